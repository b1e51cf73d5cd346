"""Rules that take PyTorch's gradients of a plain call where these are finite: no Python, and the rule's values elsewhere."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.rule import where_finite

RULES = [rule for rule in mg.rules.values() if rule.defer_to_stock is where_finite]
F64 = torch.float64


def gradients(rule, sample, **options):
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in sample.args]
    inputs = [x for x in leaves if isinstance(x, torch.Tensor)]
    y = rule.aten(*leaves, **sample.kwargs)
    return torch.autograd.grad(y, inputs, torch.ones_like(y), **options)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_finite_gradient_is_pytorchs(rule):
    for sample in list(rule.samples(F64, "cpu"))[:2]:
        expected = gradients(rule, sample)
        with mg.override():
            before = compiled_calls.counts()
            found = gradients(rule, sample)
            if compiled_calls.loaded():
                after = compiled_calls.counts()
                assert (after.plain, after.python) == (before.plain + 1, before.python)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_rule_serves_calls_that_are_not_finite():
    zero = torch.zeros(3, dtype=F64)
    two = torch.full((3,), 2.0, dtype=F64)
    for f in (torch.xlogy, torch.hypot):
        x, y = (torch.stack([zero, two]).requires_grad_() for _ in range(2))
        with mg.override():
            found = torch.autograd.grad(f(x, y).sum(), (x, y))
        assert all(g[0].eq(0).all() and g[1].gt(0).any() for g in found), f


def test_second_derivatives_are_the_rules():
    x = torch.zeros(2, dtype=F64, requires_grad=True)
    y = torch.full((2,), 2.0, dtype=F64, requires_grad=True)
    with mg.override():
        first = torch.autograd.grad((x**y).sum(), (x, y), create_graph=True)
        second = torch.autograd.grad(sum(g.sum() for g in first), (x, y))
    assert all(g.isfinite().all() for g in second)


def test_hooks_on_the_saved_tensor_are_followed():
    x = torch.full((2,), 3.0, dtype=F64, requires_grad=True)
    with mg.override():
        y = torch.hypot(x, torch.full_like(x, 4.0))
        y.grad_fn._raw_saved_self.register_hooks(lambda t: t.detach() * 2, lambda t: t)
        (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, torch.full_like(x, 6 / 5))
