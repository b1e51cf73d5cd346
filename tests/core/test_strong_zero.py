"""override(strong_zero=True): a cotangent or tangent of exactly zero stays zero, whatever it is multiplied by."""

import math

import pytest
import torch
from torch.func import grad, hessian, jvp

import torch_manualgrad as mg
from torch_manualgrad.testing import check

F64 = torch.float64
STRONG = [rule for rule in mg.rules.values() if rule.has_strong_zero]
BAD = (0.0, math.inf, -math.inf, math.nan, -1.0, 1.0, 1e300)

# Programs that people reported: what goes in, and the gradient of the sum where the branch not taken is absent.
REPORTED = {
    "sqrt at 0": (lambda x: torch.where(x == 0.0, x / 2, x.sqrt() + 1), [16.0, 0.0], [0.125, 0.5]),
    "cos at inf": (lambda x: torch.where(x < 1.0, torch.cos(x), torch.zeros_like(x)), [0.0, math.inf], [0.0, 0.0]),
    "0 / 0 twice": (lambda x: torch.where(x >= 0, x, 0 * (x / 0)), [1.0], [1.0]),
    "divided by 0": (lambda x: torch.where(torch.tensor(False), x / 0, torch.ones(())), [0.3], [0.0]),
    "exp overflows": (lambda x: torch.where(x <= 0, torch.exp(x), 1 + x), [1000.0], [1.0]),
    "log2 at 0": (lambda x: torch.where(x > 2, torch.log2(x), 2 * x), [0.0, 2.0, 4.0], [2.0, 2.0, 0.25 / math.log(2)]),
    "nan goes in": (
        lambda x: torch.where(x <= 10, torch.exp(x), torch.ones(())),
        [1.0, math.nan, 1e10],
        [math.e, 0.0, 0.0],
    ),
    "sqrt of negative numbers": (lambda x: torch.where(x > 0, torch.sqrt(x), x), [-1.0, -4.0], [1.0, 1.0]),
}


@pytest.mark.parametrize("name", REPORTED)
def test_reported_programs(name):
    f, at, expected = REPORTED[name]
    x = torch.tensor(at, dtype=F64, requires_grad=True)
    (stock,) = torch.autograd.grad(f(x).sum(), x)
    assert not stock.isfinite().all()
    with mg.override(strong_zero=True):
        (found,) = torch.autograd.grad(f(x).sum(), x)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=F64))
        tangent = jvp(lambda x: f(x).sum(), (x.detach(),), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, found.sum())
        second = hessian(lambda x: f(x).sum())(x.detach())
        assert second.isfinite().all()
        forward = torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x).sum()))(x.detach())
        torch.testing.assert_close(forward, second)
        compiled = torch.compile(lambda x: f(x).sum(), backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], found)


def test_masks_beside_where():
    x = torch.tensor([0.0, 4.0], dtype=F64)
    masks = {
        "masked_fill": lambda x: x.sqrt().masked_fill(x == 0, 0.0),
        "index": lambda x: x.sqrt()[x > 0],
        "product": lambda x: x.sqrt() * (x > 0),
    }
    with mg.override(strong_zero=True):
        for name, f in masks.items():
            assert grad(lambda x, f=f: f(x).sum())(x).tolist() == [0.0, 0.25], name


@pytest.mark.parametrize("rule", STRONG, ids=lambda r: r.name)
def test_every_rule_keeps_zeros(rule):
    """At its own samples with every kind of number put in, all cotangents and tangents zero."""
    tried = 0
    for sample in rule.samples(F64, "cpu"):
        places = [i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        for bad in BAD:
            args = [torch.full_like(x, bad) if i in places else x for i, x in enumerate(sample.args)]
            inputs = [args[i].requires_grad_() for i in places]
            with mg.override(rule, strong_zero=True):
                outputs = rule.aten(*args, **sample.kwargs)
                outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o.requires_grad]
                grads = torch.autograd.grad(outputs, inputs, [torch.zeros_like(o) for o in outputs], allow_unused=True)
                assert all(g is None or (g == 0).all() for g in grads), (sample, bad)

                def call(*xs, args=args, sample=sample):
                    given = iter(xs)
                    return rule.aten(*[next(given) if i in places else x for i, x in enumerate(args)], **sample.kwargs)

                detached = tuple(x.detach() for x in inputs)
                tangent = jvp(call, detached, tuple(map(torch.zeros_like, detached)))[1]
                assert (tangent == 0).all(), (sample, bad)
                tried += 1
    assert tried


@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
@pytest.mark.parametrize("rule", STRONG, ids=lambda r: r.name)
def test_every_rule_is_right_where_zeros_are_strong(rule, dtype):
    samples = list(rule.samples(dtype, "cpu"))[:2]
    with mg.override(rule, strong_zero=True):
        if samples:
            check(rule.probe, samples, checks=(), name=rule.name, gaps=rule.gaps)


def test_the_derivative_in_the_cotangent_is_not_lost_at_zero():
    """Where a cotangent is zero, its own derivative is the other factor."""
    x = torch.tensor([2.0, 3.0], dtype=F64, requires_grad=True)
    cotangent = torch.tensor([0.0, 1.0], dtype=F64, requires_grad=True)
    with mg.override(strong_zero=True):
        (first,) = torch.autograd.grad(x.exp(), x, cotangent, create_graph=True)
        (back,) = torch.autograd.grad(first.sum(), cotangent)
    torch.testing.assert_close(back, x.detach().exp())


def test_the_product():
    factor = torch.tensor([[0.0], [2.0]], dtype=F64)
    other = torch.tensor([math.inf, 3.0], dtype=F64)
    assert torch.ops.manualgrad.strong_times(factor, other).tolist() == [[0.0, 0.0], [math.inf, 6.0]]
    finite = torch.tensor([1.5, 3.0], dtype=F64)
    check(
        torch.ops.manualgrad.strong_times,
        [(factor + 1, finite), (factor[1], finite), (factor * (1 + 1j) + 1, finite + 0j)],
    )
