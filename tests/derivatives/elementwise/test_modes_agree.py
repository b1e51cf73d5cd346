"""Special points of elementwise functions: every mode of every order has the same number there."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp
from torch.special import erfcx, gammainc, gammaincc, i0e, i1, i1e, log_ndtr, ndtri

import torch_manualgrad as mg

# -- where several conventions meet -----------------------------------------------------------------------------------

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


# -- where functions overflow, underflow or saturate ------------------------------------------------------------------

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


# -- atan2 in every quadrant and at the origin ------------------------------------------------------------------------

ATAN2 = mg.rules["aten::atan2"]


@pytest.mark.parametrize("quadrant", [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)], ids=str)
def test_the_hessian_in_every_quadrant(quadrant):
    x = torch.tensor(quadrant, dtype=torch.float64) * torch.tensor([1.0, 2.0], dtype=torch.float64)
    hessian = torch.func.hessian(lambda x: torch.atan2(x[0], x[1]))
    expected = hessian(x)
    with mg.override(ATAN2):
        torch.testing.assert_close(hessian(x), expected)


def test_at_the_origin_every_order_is_zero():
    x = torch.zeros(2, dtype=torch.float64)
    with mg.override(ATAN2):
        assert torch.func.grad(lambda x: torch.atan2(x[0], x[1]))(x).eq(0).all()
        assert torch.func.hessian(lambda x: torch.atan2(x[0], x[1]))(x).eq(0).all()
