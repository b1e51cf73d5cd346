"""Where PyTorch has a derivative, a rule has one: again, of a gradient, and in half precision."""

import contextlib
import itertools
import warnings
from contextlib import suppress

import pytest
import torch
from helpers.tensors import is_dense_differentiable
from helpers.thinning import in_turn, label
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached as torch_reached
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.core.schema import is_differentiable, tensors_in

# -- gradients that are differentiated again: programs do that even where the result is zero --------------------------

RULES = [rule for rule in mg.rules.values() if rule.samples is not None and not rule.sparse]
WITHOUT_LISTS = [rule for rule in mg.rules.values() if not rule.signature.lists]
# the derivative is constant, and PyTorch's graph contains the input nevertheless: its second derivative is zeros there, ours None
CONSTANT = {
    "aten::grid_sampler_2d_backward": "the nearest neighbour",
    "aten::_grid_sampler_2d_cpu_fallback_backward": "the nearest neighbour",
    "aten::grid_sampler_3d_backward": "the nearest neighbour",
    "aten::index_reduce": "of self in a product that leaves self out",
}
if torch_reached("2.15"):
    CONSTANT["aten::native_group_norm"] = "of the bias"
OVERRIDES = {"override()": (), "*": ("*",)}


def depends(rule, sample, names):
    """For each input of a call, whether its gradient, and its second derivative, depend on it or another input."""
    torch.manual_seed(0)
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (sample.args, sample.kwargs))
    given = {**dict(zip(rule.signature.names, args)), **kwargs}
    with_vjp = [given.get(name) for names_of_vjp in rule.vjp for name in names_of_vjp]
    inputs = [x for x in tree_leaves(with_vjp) if isinstance(x, Tensor) and is_differentiable(x)]
    with contextlib.nullcontext() if names is None else mg.override(*names):
        for x in inputs:
            x.requires_grad_()
        found = (rule.probe or rule.aten)(*args, **kwargs)
        outputs = [y for y in tree_leaves(found) if isinstance(y, Tensor) and y.requires_grad]
        if not outputs:
            return []
        ones = [torch.ones_like(y) for y in outputs]  # which do not depend on the inputs
        gradients = torch.autograd.grad(outputs, inputs, ones, create_graph=True, allow_unused=True)
        again = [g for g in gradients if g is not None and g.requires_grad]
        seconds = [None] * len(inputs)
        if again:
            seconds = torch.autograd.grad(again, inputs, [torch.ones_like(g) for g in again], allow_unused=True)
    return [*(g is not None and g.requires_grad for g in gradients), *(h is not None for h in seconds)]


@pytest.mark.parametrize("names", OVERRIDES.values(), ids=OVERRIDES.keys())
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_second_derivatives_that_pytorch_has(rule, names):
    lost = []
    for sample in itertools.islice(rule.samples(torch.float64, "cpu"), 3):
        try:
            stock = depends(rule, sample, None)
        except (RuntimeError, NotImplementedError):
            continue
        if not stock:  # PyTorch's result has no history
            continue
        ours = depends(rule, sample, names)
        assert len(ours) == len(stock)
        if any(s and not o for s, o in zip(stock, ours)):
            lost.append(sample)
    acts = names != () or rule.improves
    assert bool(lost) == bool(rule.name in CONSTANT and acts), lost


# -- half precision ---------------------------------------------------------------------------------------------------


def tensors_of(sample):
    return [x for x in tensors_in([*sample.args, *sample.kwargs.values()]) if is_dense_differentiable(x)]


def called(rule, sample, given):
    """The outputs that have derivatives."""
    given = iter(given)
    args, kwargs = tree_map(
        lambda x: next(given) if is_dense_differentiable(x) else x, (list(sample.args), dict(sample.kwargs))
    )
    found = rule.aten(*args, **kwargs)
    names = zip(rule.signature.output_names, [found] if isinstance(found, Tensor) else found)
    return [x for n, x in names if is_dense_differentiable(x) and n not in rule.not_differentiable]


def reverse(rule, sample, order):
    with_vjp = {name for key in rule.vjp for name in key}
    values = [*zip(rule.signature.names, sample.args), *sample.kwargs.items()]
    wanted = [n in with_vjp for n, x in values for _ in tensors_of(mg.Sample(x))]
    inputs = [x.clone().requires_grad_(yes) for x, yes in zip(tensors_of(sample), wanted)]
    found = [x for x in called(rule, sample, inputs) if x.requires_grad]
    for _ in range(order):
        total = sum((x * x.conj()).real.float().sum() for x in found)
        if not isinstance(total, Tensor) or not total.requires_grad:
            return []
        asked = [x for x in inputs if x.requires_grad]
        found = torch.autograd.grad(total, asked, create_graph=True, materialize_grads=True)
    return [x.detach() for x in found]


DROPPED = "random_samples"  # PyTorch drops its tangent in silence, where a rule raises


def forward(rule, sample):
    tensors = [x.detach() for x in tensors_of(sample)]
    values = [*zip(rule.signature.names, sample.args), *sample.kwargs.items()]
    names = [n for n, x in values for _ in tensors_of(mg.Sample(x))]
    with forward_ad.dual_level():
        duals = [x if n == DROPPED else forward_ad.make_dual(x, torch.ones_like(x)) for n, x in zip(names, tensors)]
        outputs = called(rule, sample, duals)
        return [t for o in outputs if (t := forward_ad.unpack_dual(o).tangent) is not None]


WAYS = {
    "first": lambda *call: reverse(*call, 1),
    "second": lambda *call: reverse(*call, 2),
    "tangent": forward,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("rule", [r for r in mg.rules.values() if r.samples and not r.sparse], ids=lambda r: r.name)
def test_where_pytorch_has_a_derivative_a_rule_has_one(rule, dtype):
    for sample in itertools.islice(rule.samples(torch.float64, "cpu"), 2):
        narrow = lambda x: x.detach().to(dtype) if is_dense_differentiable(x) else x  # noqa: E731
        args, kwargs = tree_map(narrow, (list(sample.args), dict(sample.kwargs)))
        for way in WAYS.values():
            try:
                expected = way(rule, mg.Sample(*args, **kwargs))
            except RuntimeError:  # PyTorch has none in this dtype
                continue
            with mg.override(rule):
                found = way(rule, mg.Sample(*args, **kwargs))
            assert len(found) >= len(expected), sample


@pytest.mark.parametrize("rule, dtype", in_turn(WITHOUT_LISTS, [torch.float16, torch.bfloat16]), ids=label)
def test_a_vjp_in_half_precision_has_the_dtype_of_its_argument(rule, dtype):
    """Autograd would convert the gradient; a formula that is called is not converted."""
    derivative, signature = derivative_of(rule), rule.signature
    given = {n for names in rule.vjp for n in names}
    with warnings.catch_warnings(), suppress(RuntimeError, NotImplementedError), torch.no_grad():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(rule.samples(dtype, "cpu"), 3):
            values = list(signature.bind(sample.args, sample.kwargs))
            outputs = signature.outputs(derivative.run_below(values))
            smooth = zip(outputs, derivative.differentiable)
            grads = [torch.ones_like(o) if yes and is_dense_differentiable(o) else None for o, yes in smooth]
            needed = [n in given and is_dense_differentiable(v) for n, v in zip(signature.names, values)]
            found = derivative.vjp(needed, *derivative.residuals(values, outputs), grads)
            for name, value, wanted, gradient in zip(signature.names, values, needed, found):
                assert not wanted or gradient is None or gradient.dtype is value.dtype, name


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_formula_in_half_precision_has_the_dtype_of_its_argument(dtype, eps):
    x = torch.tensor([0.25, 0.5], dtype=dtype)
    assert mg.ops.infinitely_differentiable_logit_backward(torch.ones_like(x), x, eps).dtype is dtype
