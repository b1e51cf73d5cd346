"""Special functions of the first three orders where they overflow, underflow or saturate: the modes agree."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp
from torch.special import erfcx, gammainc, gammaincc, i0e, i1, i1e, log_ndtr, ndtri

import torch_manualgrad as mg

TWO = torch.tensor(2.0, dtype=torch.float64)
FUNCTIONS = {
    "erfcx": erfcx,
    "i0e": i0e,
    "i1": i1,
    "i1e": i1e,
    "igamma": lambda x: gammainc(TWO, x),
    "igammac": lambda x: gammaincc(TWO, x),
    "log_ndtr": log_ndtr,
    "logit": torch.logit,
    "logit, eps": lambda x: torch.logit(x, 1e-6),
    "ndtri": ndtri,
    "sinc": torch.sinc,
    "softplus": torch.nn.functional.softplus,
    "xlogy": lambda x: torch.special.xlogy(TWO, x),
    "rsqrt": torch.rsqrt,
}
SIZES = (
    0.0,
    1e-320,
    1e-200,
    1e-113,
    1e-100,
    1e-5,
    0.5,
    1.0,
    5.0,
    26.0,
    27.0,
    40.0,
    100.0,
    700.0,
    1e200,
    1e300,
    math.inf,
)
X = torch.tensor([sign * x for sign in (1, -1) for x in SIZES], dtype=torch.float64)


def forward(f):
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]


def reverse(f):
    return lambda x: grad(lambda y: f(y).sum())(x)


def derivative(f, modes):
    for mode in modes:
        f = mode(f)
    return f(X)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_modes_agree_in_the_tails(name, order):
    """In every mode the same number, infinity or nan."""
    every = list(itertools.product((forward, reverse), repeat=order))
    with mg.override("*"):
        first, *others = (derivative(FUNCTIONS[name], modes) for modes in every)
    for other in others:
        torch.testing.assert_close(
            other, first, rtol=1e-9, atol=1e-300 if name != "log_ndtr" else 1e-290, equal_nan=True
        )


@pytest.mark.parametrize(
    "name, x, order, expected",
    [
        ("erfcx", -30.0, 3, -math.inf),
        ("erfcx", -math.inf, 3, -math.inf),
        ("logit", 1e-113, 2, -1e226),
        ("logit", 1e-200, 2, -math.inf),
        ("logit", 0.0, 2, -math.inf),
        ("logit", 1e-90, 3, 2e270),
        ("logit", 1e-113, 3, math.inf),
        ("logit", 1.0, 3, math.inf),
        ("logit", 2.0, 3, math.nan),
        ("igamma", 1e-100, 3, -2.0),
        ("igammac", 1e-113, 3, 2.0),
        ("i0e", math.inf, 2, 0.0),
        ("i1e", -math.inf, 3, 0.0),
    ],
)
def test_values_in_the_tails(name, x, order, expected):
    x, expected = (torch.full((4,), v, dtype=torch.float64) for v in (x, expected))
    for modes in itertools.product((forward, reverse), repeat=order):
        f = FUNCTIONS[name]
        for mode in modes:
            f = mode(f)
        with mg.override():
            torch.testing.assert_close(f(x), expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1.0, 1e160, 1e200])
def test_series_of_complex_abs_and_sgn_at_any_scale(scale):
    p, v = scale * torch.tensor([1.0, 2.0]).double(), scale * torch.tensor([2.0, -1.0]).double()
    found = mg.forward_ad.directional(lambda x: torch.complex(x[0], x[1]).abs(), p, v, 3)
    torch.testing.assert_close([float(x) / scale for x in found], [0.0, 5**0.5, 0.0], rtol=1e-12, atol=1e-12)
    found = mg.forward_ad.directional(lambda x: torch.complex(x[0], x[1]).sgn().real, p, v, 3)
    torch.testing.assert_close([float(x) for x in found], [2 / 5**0.5, -1 / 5**0.5, -6 / 5**0.5], rtol=1e-12, atol=0)


@pytest.mark.parametrize("how", [{}, {"strong_zero": True}], ids=str)
def test_three_orders_of_complex_abs_under_torch_func(how):
    f = lambda v: torch.complex(v[0], v[1]).abs()  # noqa: E731
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for outer, middle, inner in itertools.product((jacfwd, jacrev), repeat=3):
        expected = jacrev(jacrev(jacrev(f)))(x)
        with mg.override(**how):
            torch.testing.assert_close(outer(middle(inner(f)))(x), expected)
