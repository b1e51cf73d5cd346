"""Taylor series to the fourth order beside finite differences: of each rule, in each argument, real and complex.

A series in an argument is right, or an error says that there is none: never zero for a derivative that exists. The finite
differences are those of the operator itself, which knows nothing of derivatives.
"""

import pytest
import torch
from helpers.jets import ORDER, compare
from helpers.rules import RULES
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# Arguments without a series, which raise.
NONE = {
    "aten::_prelu_kernel_backward": {"grad_output", "self", "weight"},
    "aten::_embedding_bag_backward": {"grad", "per_sample_weights"},
    "aten::_embedding_bag_dense_backward": {"grad", "per_sample_weights"},
    "aten::_embedding_bag_per_sample_weights_backward": {"grad", "weight"},
    "torch_nn::_linear_cross_entropy_batch_chunked": {"weight"},
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": {"weight"},
    **{
        f"aten::_foreach_{name}": {"self", "other", "exponent", "mat2"}
        for name in (
            "div.List maximum.Scalar maximum.ScalarList minimum.Scalar minimum.ScalarList pow.List pow.ScalarList "
            "pow.ScalarAndTensor norm.Scalar mm"
        ).split()
    },
}
# Samples are drawn at random, so that there is no difference to take; or all of them are at kinks.
NOTHING_TO_COMPARE = {"aten::_standard_gamma"}


def is_differentiable(x):
    return isinstance(x, Tensor) and x.dtype in (torch.float64, torch.complex128) and x.layout is torch.strided


def cases(rule, dtype, at_most):
    """For each sample and tensor argument: its name, f of it alone, and its value."""
    if rule.samples is None:
        return
    names = rule.signature.names
    number = 0
    for sample in rule.samples(dtype, "cpu"):
        values, spec = tree_flatten((list(sample.args), dict(sample.kwargs)))
        if any(isinstance(x, Tensor) and not x.numel() for x in values):
            continue
        values = [x.detach() if isinstance(x, Tensor) else x for x in values]
        owners = [n for n, v in zip(names, sample.args) for _ in tree_leaves(v)]
        owners += [n for n, v in sample.kwargs.items() for _ in tree_leaves(v)]

        def call(i, x, values=values, spec=spec):
            args, kwargs = tree_unflatten([*values[:i], x, *values[i + 1 :]], spec)
            return [y for y in tree_leaves(rule.probe(*args, **kwargs)) if is_differentiable(y) and y.numel()]

        try:
            call(0, values[0])
        except (RuntimeError, NotImplementedError):  # not in this dtype
            continue
        number += 1
        if number > at_most:
            return
        for i, (name, x) in enumerate(zip(owners, values)):
            if is_differentiable(x):
                yield name, lambda y, i=i, call=call: call(i, y), x


def check(rule, at_most):
    compared, raised, found = set(), set(), False
    for dtype in (torch.float64, torch.complex128):
        for name, f, x in cases(rule, dtype, at_most):
            found = True
            try:
                wrong, agreed = compare(f, x)
            except NotImplementedError as error:
                assert name in NONE.get(rule.name, ()), f"{rule.name}, {name!r}: {error}"
                raised.add(name)
                continue
            assert name not in raised, f"{rule.name}, {name!r}: raises for some samples only"
            assert name not in NONE.get(rule.name, ()), f"{rule.name}, {name!r} has a series"
            assert not wrong or rule.name in NOTHING_TO_COMPARE, f"{rule.name}, {name!r}, {dtype}: orders {wrong}"
            if len(agreed) == ORDER:
                compared.add(name)
    if found and rule.name not in NOTHING_TO_COMPARE:
        assert compared | raised, "nothing could be compared"
    return compared, raised


@pytest.mark.parametrize("rule", [r for r in RULES if "sparse" not in r.name], ids=lambda r: r.name)
def test_each_argument_has_its_series_or_raises(rule):
    check(rule, 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [r for r in RULES if "sparse" not in r.name], ids=lambda r: r.name)
def test_each_argument_of_all_samples(rule):
    check(rule, 100)
