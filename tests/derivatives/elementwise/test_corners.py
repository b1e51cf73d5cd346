"""Points where several conventions meet: every mode of every order has the same number there."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.func import grad, jvp

import torch_manualgrad as mg

F64 = torch.float64


def along(f, forward, direction):
    if forward:
        return lambda *x: jvp(f, x, direction)[1]
    every = tuple(range(len(direction)))
    return lambda *x: sum((g * t).sum() for g, t in zip(grad(lambda *y: f(*y).sum(), every)(*x), direction))


def derivatives(f, x, directions):
    """Along these directions, one after the other, in every mode."""
    found = []
    for modes in itertools.product((True, False), repeat=len(directions)):
        g = f
        for forward, direction in zip(modes, directions):
            g = along(g, forward, direction)
        found.append(g(*x).sum().item())
    return found


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [F64, torch.complex128])
def test_a_power_of_zero_is_constant_in_its_exponent(exponent, dtype):
    """Its mixed derivative too, in either order: at (0, 1) it was 1 or 0."""
    x = (torch.zeros(3, dtype=F64), torch.full((3,), exponent, dtype=F64))
    base = (torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64))
    for directions in ((base, base[::-1]), (base[::-1], base), (base[::-1], base[::-1])):
        for override in (mg.override, lambda: mg.override("*")):
            with override():
                found = derivatives(lambda x, y: torch.pow(x.to(dtype), y.to(dtype)).real, x, directions)
            assert found == [0.0] * 4


@pytest.mark.parametrize("order, expected", [(1, -math.inf), (2, math.inf), (3, -math.inf)])
def test_addcdiv_with_a_divisor_of_zero(order, expected):
    one = torch.ones(2, dtype=F64)
    with mg.override("*"):
        divisor = derivatives(lambda x: torch.addcdiv(one, one, x), (0 * one,), [(one,)] * order)
        dividend = derivatives(lambda x: torch.addcdiv(one, x, 0 * one), (one,), [(one,)] * order)
    assert divisor == [expected] * 2**order
    assert dividend == [math.inf if order == 1 else 0.0] * 2**order


@pytest.mark.parametrize("order", [1, 2, 3])
def test_l1_loss_of_a_complex_number_and_itself(order):
    """It is zero wherever z is."""

    def loss(x, y):
        z = torch.complex(x, y)
        return torch.nn.functional.l1_loss(z, z)

    x = (torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([2.0, 0.0], dtype=F64))
    with mg.override():
        assert derivatives(loss, x, [(x[0] + 1, x[1] - 3)] * order) == [0.0] * 2**order
