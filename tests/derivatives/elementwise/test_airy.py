"""The Airy function, next to mpmath in three orders and in every mode, and where it grows, decays or has no limit."""

from __future__ import annotations

import functools
import math

import mpmath
import pytest
import torch
from torch.func import grad, jvp

import torch_manualgrad as mg
from torch_manualgrad.derivatives.elementwise import airy

inf, nan = math.inf, math.nan
DTYPES = [torch.float64, torch.float32]


def points(dtype, low, high, count=150):
    unit = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    return (low + (high - low) * torch.cat([torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), unit])).to(dtype)


def forward(f):
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]


def reverse(f):
    return lambda x: grad(lambda y: f(y).sum())(x)


@functools.cache
def exact(x, order):
    with mpmath.workdps(40):
        x = mpmath.mpf(x)
        value, slope = mpmath.airyai(x), mpmath.airyai(x, derivative=1)
        return [value, slope, x * value, value + x * slope][order]


def height(x, order):
    """What errors are relative to: the terms of the exact derivative where it decays, its envelope where it oscillates."""
    if x > 0:
        value, slope = exact(x, 0), exact(x, 1)
        return [value, -slope, x * value, value - x * slope][order]
    return max(1, -x) ** ([-0.25, 0.25, 0.75, 1.25][order]) / math.sqrt(math.pi)


def assert_close(found, x, order, units):
    info = torch.finfo(found.dtype)
    for y, at in zip(found.tolist(), x.tolist()):
        error = abs(y - exact(at, order))
        assert error <= units * info.eps * height(at, order) + info.smallest_normal, (at, y, exact(at, order))


@pytest.mark.parametrize("dtype", DTYPES, ids=["f64", "f32"])
@pytest.mark.parametrize("low, high", [(-50, -10), (-10, -2), (-2, 1), (1, 10), (10, 50)])
@pytest.mark.parametrize("modes", [(reverse,) * 3, (forward,) * 3, (reverse, forward, reverse)], ids=["r", "f", "rfr"])
def test_three_orders_next_to_mpmath(modes, low, high, dtype):
    x, f = points(dtype, low, high), torch.special.airy_ai
    with mg.override():
        for order, mode in enumerate(modes, 1):
            f = mode(f)
            assert_close(f(x), x, order, units=4)


@pytest.mark.parametrize("low, high", [(-1e4, -50), (-1e7, -1e6), (50, 105)])
def test_the_phase_and_the_exponent_keep_their_digits_far_from_zero(low, high):
    x = points(torch.float64, low, high)
    assert_close(airy.airy_ai_slope(x), x, 1, units=4)
    assert_close(airy.airy_ai(x), x, 0, units=4)


def test_the_table_is_that_of_mpmath():
    for n, (value, slope) in enumerate(zip(airy._AI, airy._AI_SLOPE, strict=True), -20):
        assert (value, slope) == (float(exact(n / 2, 0)), float(exact(n / 2, 1)))


@pytest.mark.parametrize("place", [-10.0, 0.0, 10.0])
def test_the_series_agree_where_they_meet(place):
    x = torch.tensor([place, math.nextafter(place, inf), math.nextafter(place, -inf)], dtype=torch.float64)
    assert_close(airy.airy_ai_slope(x), x, 1, units=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f64", "f32"])
@pytest.mark.parametrize(
    "x, limit", [(inf, 0.0), (torch.finfo(torch.float32).max, 0.0), (1e3, 0.0), (-inf, nan), (nan, nan)]
)
def test_limits(x, limit, dtype):
    f, x = torch.special.airy_ai, torch.tensor([x], dtype=dtype)
    with mg.override():
        for order in range(3):
            f = reverse(f) if order % 2 else forward(f)
            torch.testing.assert_close(f(x), torch.tensor([limit], dtype=dtype), rtol=0, atol=0, equal_nan=True)


def test_shapes():
    with mg.override():
        for shape in ((), (0, 3), (2, 1, 3)):
            x = torch.zeros(shape, dtype=torch.float64)
            assert reverse(torch.special.airy_ai)(x).shape == shape
