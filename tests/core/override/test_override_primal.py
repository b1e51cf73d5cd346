"""Rules that replace the primal too, and calls that a rule leaves to PyTorch."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.calls import is_pytorchs
from helpers.sine import factor, sine_times
from helpers.tensors import random, same
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.registry import Registry
from torch_manualgrad.core.rule import primal_for


def test_forward_is_used_when_asked_for():
    rule = sine_times(2, forward=lambda x: 100 * x)
    x = random(3)
    with mg.override(rule):
        assert torch.sin(x).equal(x.sin())
    with mg.override(rule, forward=True):
        same((torch.sin(x), vmap(torch.sin)(x)), (100 * x,) * 2)
        same(torch.sin(x.clone().requires_grad_()).detach(), 100 * x)
        same(jvp(torch.sin, (x,), (x,)), (100 * x, 2 * x * x.cos()))
        assert factor() == 2
    handle = mg.install(rule, forward=True)
    same(torch.sin(x), 100 * x)
    handle.remove()


def test_calls_that_a_rule_leaves_to_pytorch(monkeypatch):
    asked = []
    left = sine_times(2, defer_to_stock=lambda x: asked.append(x) or len(x) < 4, improves="speed")
    rules = Registry("rule")
    rules.add(left.name, left)
    monkeypatch.setattr("torch_manualgrad.core.override.names.rules", rules)
    x = random(3).requires_grad_()
    with mg.override():
        assert is_pytorchs(torch.sin(x).grad_fn)
        assert factor(lambda x: torch.cat([x, x]).sin()[:3]) == 2
        seen, x = len(asked), x.detach()
        same(grad(lambda x: x.sin().sum())(x), 2 * x.cos())
        same(jvp(torch.sin, (x,), (x,))[1], 2 * x * x.cos())
        with fwAD.dual_level():
            same(fwAD.unpack_dual(torch.sin(fwAD.make_dual(x, x))).tangent, 2 * x * x.cos())
        assert len(asked) == seen, "where forward derivatives may follow it is not asked"
        with mg.override(left):
            assert factor() == 2
        assert factor() == 1
    with mg.override("*"):
        assert factor() == 2
    with mg.override(left):
        assert factor() == 2


def test_a_forward_is_for_dense_tensors():
    x = random(3)
    stock = x.sin()
    with mg.override(sine_times(2, forward=lambda x: 100 * x), forward=True):
        same(torch.sin(x.to_sparse()).to_dense(), stock)


def test_a_failed_activation_leaves_no_registration(monkeypatch):
    from torch_manualgrad.core.override import kernels

    first, second = sine_times(2), mg.rule("aten::atanh", vjp={"self": lambda grad: grad}, register=False)
    operator = kernels._Operator

    def fail(rule):
        if rule is second:
            raise MemoryError
        return operator(rule)

    monkeypatch.setattr(kernels, "_Operator", fail)
    monkeypatch.delitem(kernels._operators, second.name, raising=False)  # as if no rule had acted on it yet
    with pytest.raises(MemoryError):
        mg.install(first, second)
    assert factor() == 1


def test_a_forward_may_call_the_operator_it_replaces():
    rule = sine_times(2, forward=lambda x: 100 * torch.sin(x))
    stock = torch.sin(random(3))
    with mg.override(rule, forward=True):
        same(torch.sin(random(3)), 100 * stock)
        same(torch.sin(random(3).requires_grad_()).detach(), 100 * stock)
        same(vmap(torch.sin)(random(3)), 100 * stock)
        same(jvp(torch.sin, (random(3),), (random(3),))[0], 100 * stock)


def test_a_rule_has_one_replacement_forward():
    rule, function = sine_times(2), lambda x: 100 * x
    assert rule.forward is None and primal_for(rule)(function) is function is rule.forward
    with mg.override(rule, forward=True):
        same(torch.sin(random(3)), 100 * random(3))
    for one in (rule, sine_times(2, forward=function)):
        with pytest.raises(ValueError, match="already"):
            primal_for(one)(lambda x: 1000 * x)
    assert sine_times(2).forward is None  # another rule of the same operator
