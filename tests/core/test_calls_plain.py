"""Calls that csrc/calls serves: which these are, and that their values and gradients are those of Python."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.calls import NORM, is_pytorchs, made, needs_library, norm, vector
from torch.utils._python_dispatch import TorchDispatchMode

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.rule import rule

pytestmark = needs_library


def test_a_plain_call_needs_no_python():
    x = vector()
    with mg.override(NORM):
        y, forward = made(lambda: norm(x))
        (g,), backward = made(lambda: torch.autograd.grad(y, x))
    assert forward == (1, 0, 0) and backward == (0, 1, 0)
    assert y.grad_fn.name() == "LinalgVectorNormBackward0" and not is_pytorchs(y.grad_fn)
    torch.testing.assert_close(g, x.detach() / y.detach())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: norm(x, 3),
        lambda x: norm(x, 2.5, [0], True),
        lambda x: x.norm(),
        lambda x: torch.norm(x, p=1),
        lambda x: torch.ops.aten.norm.Scalar(x, 3),
        lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, None, [0]),
        lambda x: norm(x.to(torch.complex128) * 1j),
        lambda x: norm(x, dtype=torch.float64),
    ],
)
def test_it_is_the_same_gradient(call):
    x = vector()
    with mg.override("norm", "linalg.vector_norm"):
        (g,), count = made(lambda: torch.autograd.grad(call(x).sum(), x))
        with compiled_calls.in_python():
            (expected,), none = made(lambda: torch.autograd.grad(call(x).sum(), x))
    assert count == (1, 1, 0) and none == (0, 0, 0)
    assert torch.equal(g, expected)


def test_the_formula_is_left_to_python_where_precisions_differ():
    x = vector().detach().float().requires_grad_()
    with mg.override(NORM):
        (g,), count = made(lambda: torch.autograd.grad(norm(x, dtype=torch.float64), x))
    assert count == (1, 0, 1) and g.dtype == torch.float32


def test_no_gradient_is_stock():
    x = vector()
    with mg.override(NORM):
        y, count = made(lambda: norm(x.detach()))
        with torch.no_grad():
            z, none = made(lambda: norm(x))
    assert count == none == (0, 0, 0) and y.grad_fn is None and not z.requires_grad
    assert torch.equal(y, norm(x.detach()))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_calls_that_are_not_plain_enter_python():
    x, t = vector(), vector(1).detach()
    with mg.override(NORM):
        with forward_ad.dual_level():
            (_, tangent), count = made(lambda: forward_ad.unpack_dual(norm(forward_ad.make_dual(x, t))))
            assert count[0] == 0 and tangent is not None
        assert made(lambda: torch.func.grad(norm)(x.detach()))[1][0] == 0
        assert made(lambda: torch.func.vmap(torch.func.grad(norm))(x.detach().reshape(5, 1)))[1][0] == 0
        seen = Seen()
        with seen:
            y, count = made(lambda: norm(x))
            assert count == (0, 0, 0) and NORM in seen.names and not is_pytorchs(y.grad_fn)
        assert made(lambda: norm(x.to_sparse().coalesce().values()))[1][0] == 1
    product = {"self": lambda grad, other: grad * other, "other": lambda grad, self: grad * self}
    with mg.override(rule("aten::mul.Tensor", vjp=product, register=False)):
        assert made(lambda: x * 2)[1] == made(lambda: x * x)[1] == (1, 0, 0)


NUMBERS = {
    "mul": lambda x, number: number * x,
    "div": lambda x, number: x / number,
    "rdiv": lambda x, number: number / x,
    "where": lambda x, number: torch.where(x.real > 0, x, number),
    "xlogy": lambda x, number: torch.xlogy(x, abs(number)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_promote_in_the_derivative_as_in_the_value(name):
    """PyTorch's gradients, in value and dtype, of first and second order; the same with calls left to Python."""

    def derivatives(x, number):
        y = NUMBERS[name](x, number)
        (g,) = torch.autograd.grad(y, x, torch.full_like(y, 1 / 3), create_graph=True)
        again = torch.autograd.grad(g, x, torch.ones_like(g))[0] if g.requires_grad else None
        return y, g, again

    for dtype in (torch.float16, torch.float32, torch.float64, torch.complex64):
        for size in ((), (3,)):
            x = (torch.arange(1.0, 4.0) if size else torch.tensor(1.5)).to(dtype).requires_grad_()
            for number in (True, 2, 0.7, 1.5 + 0.5j):
                if name == "xlogy" and (dtype.is_complex or type(number) in (bool, complex)):
                    continue
                if dtype is torch.float16 and type(number) is complex:
                    continue  # PyTorch has little of complex halves
                want = derivatives(x, number)
                with mg.override("*"):
                    found, count = made(lambda x=x, number=number: derivatives(x, number))
                    with compiled_calls.in_python():
                        general = derivatives(x, number)
                assert count[0] > 0
                for a, b, c in zip(want, found, general):
                    assert a is b is c is None or a.dtype == b.dtype == c.dtype
                    torch.testing.assert_close(b, a)
                    torch.testing.assert_close(c, a)
                if name == "mul" and size:  # what is rounded where PyTorch rounds it
                    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


def test_a_mode_around_the_backward_alone():
    x = vector()
    with mg.override(NORM):
        y = norm(x)
        with Seen() as seen:
            (g,), count = made(lambda: torch.autograd.grad(y, x))
    assert count == (0, 0, 1) and "manualgrad::norm_backward" in seen.names
    torch.testing.assert_close(g, x.detach() / y.detach())
