"""Taylor series at zeros, and at very small and very large arguments, by closed forms."""

import math

import mpmath
import pytest
import torch

import torch_manualgrad as mg

F64 = torch.float64
FAR, FARTHER = math.exp(-39.5), math.exp(-199.5)


def stacked(function):
    """A function of the logits x and 1/2."""
    return lambda x: function(torch.stack([x, torch.full_like(x, 0.5)]))


# name: (function, point, first derivatives)
CASES = {
    "x ** 2.5": (lambda x: x**2.5, 0.0, [0.0, 0.0]),
    "x ** 100": (lambda x: x**100, 0.0, [0.0, 0.0, 0.0]),
    "|x| ** 1.5": (lambda x: x.abs() ** 1.5, 0.0, [0.0]),
    "0 ** x": (lambda x: torch.pow(0.0, x), 2.0, [0.0, 0.0]),
    "x ** (x + 2)": (lambda x: torch.pow(x, x + 2), 0.0, [0.0, 2.0]),
    "hypot, large": (lambda x: torch.hypot(x, x), 1e200, [2**0.5]),
    "hypot, small": (lambda x: torch.hypot(x, torch.zeros_like(x)), 1e-160, [1.0, 0.0, 0.0]),
    "hypot, at zero": (lambda x: torch.hypot(x, torch.zeros_like(x)), 0.0, [0.0, 0.0]),
    "hypot, of one": (lambda x: torch.hypot(x, torch.ones_like(x)), 0.0, [0.0, 1.0, 0.0, -3.0]),
    "abs of a complex number": (lambda x: torch.complex(x, x * 0).abs(), 1e-160, [1.0, 0.0]),
    "atan2, large": (lambda x: torch.atan2(x, torch.full_like(x, 1e200)), 1e200, [0.5e-200]),
    "atan2, small": (lambda x: torch.atan2(x, torch.full_like(x, 1e-200)), 1e-200, [0.5e200]),
    "asinh, large": (torch.asinh, 1e200, [1e-200]),
    "asin, small": (torch.asin, 1e-20, [1.0, 1e-20, 1.0]),
    "acos, small": (torch.acos, 1e-20, [-1.0, -1e-20, -1.0]),
    "softmax, far": (stacked(lambda x: x.softmax(0)[0]), 40.0, [FAR, -FAR, FAR, -FAR]),
    "softmax, farther": (stacked(lambda x: x.softmax(0)[0]), 200.0, [FARTHER, -FARTHER, FARTHER]),
    "softmax, the other": (stacked(lambda x: x.softmax(0)[1]), 40.0, [-FAR, FAR, -FAR, FAR]),
    "log_softmax, far": (stacked(lambda x: x.log_softmax(0)[0]), 40.0, [FAR, -FAR, FAR, -FAR]),
    "logsumexp, far": (stacked(lambda x: x.logsumexp(0)), 40.0, [1.0, FAR, -FAR, FAR]),
    "gelu, far": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 1e200, [1.0, 0.0, 0.0]),
    "atanh, small": (torch.atanh, 1e-20, [1.0, 2e-20, 2.0]),
}


@pytest.mark.parametrize("case", CASES)
def test_closed_forms(case):
    function, at, expected = CASES[case]
    x = torch.tensor(at, dtype=F64)
    found = mg.forward_ad.directional(function, x, torch.ones_like(x), len(expected))
    torch.testing.assert_close(torch.stack(list(found)), torch.tensor(expected, dtype=F64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.nn.functional.silu])
def test_complex_sigmoids_far_from_zero(function):
    """The sigmoid is 1 - exp(-z) on the right, and exp(z) on the left."""
    for z in (90 + 1j, 800 + 2j, -90 + 1j):
        x = torch.tensor(z, dtype=torch.complex128)
        e = torch.exp(-x if z.real > 0 else x)
        expected = {
            True: [e, -e] if function is torch.sigmoid else [1 - e + x * e, 2 * e - x * e],
            False: [e, e] if function is torch.sigmoid else [e + x * e, 2 * e + x * e],
        }[z.real > 0]
        found = mg.forward_ad.directional(function, x, torch.ones_like(x), 2)
        torch.testing.assert_close(list(found), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("z", [1e-20 + 0.3j, 0.3 + 1e-20j, 1 - 1e-12 + 1e-12j])
def test_each_part_of_a_complex_number(z):
    x = torch.tensor(z, dtype=torch.complex128)
    with mpmath.workdps(60):
        square = 1 - mpmath.mpc(z) ** 2
        known = {torch.asin: 1 / mpmath.sqrt(square), torch.acos: -1 / mpmath.sqrt(square), torch.atanh: 1 / square}
    for function, expected in known.items():
        (found,) = mg.forward_ad.directional(function, x, torch.ones_like(x), 1)
        assert found.real.item() == pytest.approx(float(expected.real), rel=1e-14)
        assert found.imag.item() == pytest.approx(float(expected.imag), rel=1e-14)


def test_single_precision():
    x = torch.tensor([1e20])
    (found,) = mg.forward_ad.directional(lambda x: torch.hypot(x, x), x, torch.ones(1), 1)
    torch.testing.assert_close(found, torch.tensor([2**0.5]))


def test_half_precision():
    x = torch.tensor([-300.0, 100.0, 150.0, 6e4], dtype=torch.float16)
    function = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    found = mg.forward_ad.directional(function, x, torch.ones_like(x), 2)
    torch.testing.assert_close(found[0], (x > 0).half(), rtol=0, atol=0)
    assert not found[1].any()


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.logsumexp])
def test_no_entries(function):
    x = torch.zeros(0, 3, dtype=F64)
    value, series = mg.forward_ad.jet(lambda x: function(x, 0), (x,), ([x, x],))
    torch.testing.assert_close(value, function(x, 0))
    assert len(series) == 2 and all(s.shape == value.shape and not s.any() for s in series)


def test_neighbours_of_a_zero():
    x = torch.tensor([0.0, 1.0], dtype=F64)
    found = mg.forward_ad.hessian_diagonal(lambda x: (x**2.5).sum())(x)
    torch.testing.assert_close(found, torch.tensor([0.0, 3.75], dtype=F64))


def test_a_point_without_dims():
    x = torch.tensor(2.0, dtype=F64)
    torch.testing.assert_close(mg.forward_ad.hessian_diagonal(lambda x: x**3)(x), 6 * x)
    torch.testing.assert_close(
        mg.forward_ad.hessian_diagonal(lambda x: torch.stack([x**3, x]))(x), torch.stack([6 * x, 0 * x])
    )


def test_against_nested_jvps():
    x, one = torch.tensor(0.7, dtype=F64), torch.ones((), dtype=F64)
    for function in (
        lambda x: torch.hypot(x.sin(), x.exp()),
        lambda x: torch.atan2(x.sin(), x.exp()),
        lambda x: torch.complex(x.sin(), x.cos() * x).abs(),
        lambda x: (x + 1).pow(x.sin()),
        lambda x: x**2.5,
        torch.asinh,
    ):
        slope = function
        expected = []
        for _ in range(4):
            slope = (lambda f: lambda x: torch.func.jvp(f, (x,), (one,))[1])(slope)
            with mg.override("*"):
                expected.append(slope(x))
        torch.testing.assert_close(list(mg.forward_ad.directional(function, x, one, 4)), expected, rtol=1e-13, atol=0)
