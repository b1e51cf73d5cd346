"""Checks of what a user's formulas return. An error names the rule, the argument, what was expected and what was returned."""

from __future__ import annotations

import pytest
import torch
from helpers.rules import local

import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of

X = torch.ones(2, 3, dtype=torch.float64)
BOTH = ("self", "other")
RULE = "rule aten::atan2: the vjp of "
PAIR = r"\('self', 'other'\): expected a tuple of 2 gradients \(None for zero\), got "
ONE = "'self': expected a floating point or complex Tensor of shape .*, or None, got "


def rev(op):
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    return torch.autograd.grad(op(x, y).sum(), (x, y))


def func(op):
    return torch.func.grad(lambda x, y: op(x, y).sum(), (0, 1))(X, X)


def fwd(op):
    return torch.func.jvp(op, (X, X), (X, X))


def vmap(op):
    return torch.func.vmap(torch.func.grad(lambda x, y: op(x, y).sum(), (0, 1)))(X, X)


@pytest.mark.parametrize("way", [rev, func, fwd, vmap], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "vjp, message",
    [
        ({BOTH: lambda grad, self: (grad,)}, PAIR + "1"),
        ({BOTH: lambda grad, self: (grad, grad, grad)}, PAIR + "3"),
        ({BOTH: lambda grad, self: grad}, PAIR + "a Tensor of shape"),
        ({BOTH: lambda grad, self: None}, PAIR + "None"),
        ({BOTH: lambda grad, self: (grad[0], grad)}, ONE + "shape"),
        ({"self": lambda grad: (grad,), "other": lambda grad: grad}, ONE + r"\("),
        ({"self": lambda grad: 3.0, "other": lambda grad: grad}, ONE + "3.0"),
        ({"self": lambda grad: grad.long(), "other": lambda grad: grad}, ONE + "a Tensor of shape .* and torch.int64"),
        ({"self": lambda grad: torch.stack([grad, grad]), "other": lambda grad: grad}, ONE + "shape"),  # autograd would sum it
    ],
    ids=["one", "three", "a tensor", "None", "a shape", "a tuple", "a number", "integers", "too large"],
)  # fmt: skip
def test_gradients_that_do_not_fit(vjp, message, way):
    with mg.override(local("aten::atan2", vjp=vjp)), pytest.raises((RuntimeError, TypeError), match=RULE + message):
        way(torch.atan2)


def test_an_operator_of_one_tensor():
    for wrong in (lambda grad: grad[0], lambda grad: torch.stack([grad, grad]), lambda grad: 2):
        x = X.clone().requires_grad_()
        with mg.override(local("aten::sin", vjp={"self": wrong})):
            y = x.sin().sum()
        with pytest.raises(RuntimeError, match="rule aten::sin: the vjp of 'self': expected"):
            y.backward()


def test_gradients_that_fit():
    """Zero, and the shape of the result for an argument that was broadcast."""
    rule = local("aten::atan2", vjp={BOTH: lambda grad, self: (grad * self, None)})
    x, y = X.clone().requires_grad_(), X[0].clone().requires_grad_()
    with mg.override(rule):
        assert torch.autograd.grad(torch.atan2(x, y).sum(), x)[0].equal(X)
        assert torch.autograd.grad(torch.atan2(y, x).sum(), y)[0].equal(2 * X[0])


@pytest.mark.parametrize("fact", ["sizes", "strides", "storage_offset", "dtype", "device", "layout", "blocksize"])
def test_facts_of_a_tensor_that_is_not_given(fact):
    seen: list[object] = []
    formula = eval(f"lambda grad_result0, weight_{fact}: (seen.append(weight_{fact}), grad_result0)[1]", {"seen": seen})
    rule = local("aten::native_layer_norm", vjp={"input": formula})
    for transform in (lambda f: f, torch.func.vmap):
        x = X.clone().requires_grad_()
        with mg.override(rule):
            transform(lambda x: torch.native_layer_norm(x, [3], None, None, 0.1)[0])(x).sum().backward()
        assert x.grad.equal(X)
    assert seen == [None, None]


def test_lists():
    wrong = local("aten::cat", vjp={"tensors": lambda grad: [grad]})
    with mg.override(wrong), pytest.raises(RuntimeError, match="'tensors': expected a list of 2 gradients, got 1"):
        rev(lambda *xs: torch.cat(xs))
    wrong = local("aten::cat", vjp={"tensors": lambda grad: [grad[:2], grad[:1]]})
    with (
        mg.override(wrong),
        pytest.raises(RuntimeError, match=r"'tensors\[1\]': expected .* \[2, 3\], .* got shape \[1, 3\]"),
    ):
        rev(lambda *xs: torch.cat(xs))


@pytest.mark.parametrize(
    "jvp, message",
    [
        (lambda self_t: 3.0, "expected a Tensor or None as the tangent of output 'result', got float"),
        (
            lambda self_t: self_t[0],
            r"the tangent of output 'result' has shape \(3,\), but the output has shape \(2, 3\)",
        ),
        (
            lambda self_t: self_t * 1j,
            "the tangent of output 'result' is torch.complex128, but the output is torch.float64",
        ),
    ],
    ids=["a number", "a shape", "complex"],
)
def test_tangents_that_do_not_fit(jvp, message):
    rule = local("aten::atan2", vjp={"self": lambda grad: grad, "other": lambda grad: grad}, jvp={"result": jvp})
    with mg.override(rule), pytest.raises(RuntimeError, match=f"In the jvp of aten::atan2, written at .*: {message}"):
        fwd(torch.atan2)
    several = local(
        "aten::aminmax", vjp={"self": lambda grad_min: grad_min}, jvp={("min", "max"): lambda self_t: (self_t,)}
    )
    message = (
        r"rule aten::aminmax: the jvp of \('min', 'max'\): expected a tuple of 2 tangents \(None for zero\), got 1"
    )
    with mg.override(several), pytest.raises(RuntimeError, match=message):
        torch.func.jvp(torch.aminmax, (X[0],), (X[0],))


def test_the_packages_own_rules_are_checked_by_its_tests():
    assert not [rule.name for rule in mg.rules.values() if derivative_of(rule).checked]
