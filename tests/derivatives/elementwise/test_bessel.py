"""Scaled and spherical Bessel functions: their derivatives far from zero, where recurrences cancel."""

from __future__ import annotations

import mpmath
import pytest
import torch
from torch.func import jvp

import torch_manualgrad as mg


def _scaled(n):
    """The derivatives of exp(x) K_n(x), by y' = A y for y = exp(x) (K_0(x), K_1(x))."""

    def derivatives(x):
        y = mpmath.exp(x) * mpmath.matrix([mpmath.besselk(0, x), mpmath.besselk(1, x)])
        A = mpmath.matrix([[1, -1], [-1, 1 - 1 / x]])
        slope, curvature = mpmath.matrix([[0, 0], [0, 1 / x**2]]), mpmath.matrix([[0, 0], [0, -2 / x**3]])
        second = slope + A * A
        third = curvature + slope * A + A * slope + second * A
        return [(B * y)[n] for B in (A, second, third)]

    return derivatives


EXACT = {
    "scaled_modified_bessel_k0": _scaled(0),
    "scaled_modified_bessel_k1": _scaled(1),
    "spherical_bessel_j0": lambda x: [mpmath.diff(mpmath.sinc, x, order) for order in (1, 2, 3)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_derivatives_far_from_zero(name, dtype):
    points = [0.75, 2.0, 3.0, 8.0, 11.75, 26.0, 31.0, 33.0, 1000.0, 1e6]
    if name == "spherical_bessel_j0":  # away from zeros of the derivatives
        points = [3.0, 12.0, 1e3 + 0.5, 1e4 + 0.5, 1e6 + 0.5, 1e8]
    f = getattr(torch.special, name)
    x = torch.tensor(points, dtype=dtype)
    with mpmath.workdps(60):
        exact = [EXACT[name](mpmath.mpf(point)) for point in x.tolist()]
    for order in range(3):
        f = (lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1])(f)
        with mg.override():
            found = f(x).tolist()
        errors = [float(abs(a / b[order] - 1)) for a, b in zip(found, exact)]
        assert max(errors) < 8 * torch.finfo(dtype).eps, (order, errors)
