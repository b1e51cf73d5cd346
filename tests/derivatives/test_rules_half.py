"""Half precision: where PyTorch has a derivative, a rule has one."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

import torch_manualgrad as mg
from torch_manualgrad.core.schema import is_differentiable, tensors_in


def is_number(x):
    return isinstance(x, torch.Tensor) and is_differentiable(x) and x.layout is torch.strided


def tensors_of(sample):
    return [x for x in tensors_in([*sample.args, *sample.kwargs.values()]) if is_number(x)]


def called(rule, sample, given):
    """The outputs that have derivatives."""
    given = iter(given)
    args, kwargs = tree_map(lambda x: next(given) if is_number(x) else x, (list(sample.args), dict(sample.kwargs)))
    found = rule.aten(*args, **kwargs)
    names = zip(rule.signature.output_names, [found] if isinstance(found, torch.Tensor) else found)
    return [x for n, x in names if is_number(x) and n not in rule.not_differentiable]


def reverse(rule, sample, order):
    with_vjp = {name for key in rule.vjp for name in key}
    values = [*zip(rule.signature.names, sample.args), *sample.kwargs.items()]
    wanted = [n in with_vjp for n, x in values for _ in tensors_of(mg.Sample(x))]
    inputs = [x.clone().requires_grad_(yes) for x, yes in zip(tensors_of(sample), wanted)]
    found = [x for x in called(rule, sample, inputs) if x.requires_grad]
    for _ in range(order):
        total = sum((x * x.conj()).real.float().sum() for x in found)
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
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
        narrow = lambda x: x.detach().to(dtype) if is_number(x) else x  # noqa: E731
        args, kwargs = tree_map(narrow, (list(sample.args), dict(sample.kwargs)))
        for way in WAYS.values():
            try:
                expected = way(rule, mg.Sample(*args, **kwargs))
            except RuntimeError:  # PyTorch has none in this dtype
                continue
            with mg.override(rule):
                found = way(rule, mg.Sample(*args, **kwargs))
            assert len(found) >= len(expected), sample
