"""Modified Bessel functions, and sinc: entire functions whose derivatives divide by $x$.

Near zero the derivative is a power series, so that every order is finite and right there; PyTorch's orders from the
second on are nan, zero or noise. Far from zero those of ``i0e`` and ``i1e`` are differences of nearly equal numbers,
which PyTorch returns as 0 or as noise; here they are the derivative of the asymptotic series.

Where not differentiable: for ``i0e`` at 0, and for ``i1e`` at 0 from the second order on, where the sign of $x$ counts
as 0.

Args:
    grad: cotangent of the result.
    self: $x$, real.
"""

from __future__ import annotations

from math import factorial, pi, prod, sqrt

import torch
from torch import Tensor

from torch_manualgrad.core.rule import elementwise, formula

from .series import polynomial

_NEAR = 2.0  # where |pi x| of sinc, or |x| of i1, is below this, the series; its last terms are below 1e-20 there
_SINC = [(-1) ** k * 2 * k / factorial(2 * k + 1) for k in range(1, 18)]  # sinc'(x) / pi, with y = pi x, by y^(2 k - 1)
_I1 = [(2 * k + 1) / (2 * factorial(k) * factorial(k + 1)) for k in range(18)]  # i1'(x), by (x / 2)^(2 k)
_FAR = 32.0  # from here on exp(-x) I_n(x) is an asymptotic series, whose terms fall below 1e-17
_FAR_I0E, _FAR_I1E = (
    # its derivative, by x^(-k - 3/2)
    [
        -(k + 0.5) / sqrt(2 * pi) * prod(((2 * j - 1) ** 2 - 4 * n * n) / (8 * j) for j in range(1, k + 1))
        for k in range(20)
    ]
    for n in (0, 1)
)


@formula
def sinc_backward(grad: Tensor, self: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $sin(pi x) / (pi x)$: $g conj(cos(y) y - sin(y)) pi / conj(y)^2$ with $y = pi x$.

    Args:
        self: $x$, real or complex.

    Returns:
        The shape of ``grad``; zero at $x = 0$.

    References:
        ATen sinc_backward; near zero, the power series of the sine.
    """
    y = self * pi
    near = y.abs() < _NEAR
    small, large = torch.where(near, y, 0), torch.where(near, 1, y)
    series = small * polynomial(_SINC, small * small)
    turns = 2 * ((self.real if self.is_complex() else self).detach() / 2).round()  # exact, where pi x is not
    angle = torch.where(near, 1, (self - torch.where(turns.isfinite(), turns, 0)) * pi)
    quotient = (angle.cos() - angle.sin() / large) / large
    return grad * (torch.where(near, series, quotient) * pi).conj()


@formula
def i1_backward(grad: Tensor, self: Tensor, result: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $I_1(x)$: $g (I_0(x) - I_1(x) / x)$.

    Args:
        result: $I_1(x)$.

    Returns:
        The shape of ``grad``; $g / 2$ at $x = 0$.

    References:
        ATen i1_backward; near zero, the power series: DLMF 10.25.2, https://dlmf.nist.gov/10.25.E2.
    """
    near, small, large = _split(self)
    quotient = torch.special.i0(large) - torch.where(near, 0, result) / large
    return grad * torch.where(near, polynomial(_I1, small * small / 4), quotient)


@formula
def i1e_backward(grad: Tensor, self: Tensor, result: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $r = exp(-|x|) I_1(x)$: $g (exp(-|x|) I_0(x) - r / x - r sgn(x))$.

    Args:
        result: $r$.

    Returns:
        The shape of ``grad``; $g / 2$ at $x = 0$.

    Note:
        Where not differentiable: at $x = 0$ from the second order on, where $sgn(x)$ counts as 0.

    References:
        ATen i1e_backward; near zero as `i1_backward`; far from it DLMF 10.40.1, https://dlmf.nist.gov/10.40.E1.
    """
    near, small, large = _split(self)
    series = polynomial(_I1, small * small / 4) * (-small.abs()).exp()
    quotient = torch.special.i0e(large) - torch.where(near, 0, result) / large
    slope = torch.where(near, series, quotient) - self.detach().sgn() * result
    return grad * torch.where(self.abs() < _FAR, slope, _far(_FAR_I1E, self))


def _i0e_slope(self: Tensor, result: Tensor) -> Tensor:
    """$exp(-|x|) I_1(x) - sgn(x) exp(-|x|) I_0(x)$."""
    sign = self.detach().sgn()
    return torch.where(self.abs() < _FAR, torch.special.i1e(self) - sign * result, sign * _far(_FAR_I0E, self))


def _far(coefficients: list[float], self: Tensor) -> Tensor:
    """The asymptotic series of a derivative, where $|x|$ is large; anything finite elsewhere."""
    size = self.abs().clamp(min=_FAR)
    inverse = 1 / torch.where(size.isinf(), torch.finfo(size.dtype).max, size)  # the root of zero has no derivative
    return inverse * inverse.sqrt() * polynomial(coefficients, inverse)


def _split(self: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which $x$ are near zero; $x$ there and 0 elsewhere; 1 there and $x$ elsewhere."""
    near = self.abs() < _NEAR
    return near, torch.where(near, self, 0), torch.where(near, 1, self)


elementwise("aten::sinc", sinc_backward, improves="values")
elementwise("aten::i0", lambda self: torch.special.i1(self), real_only=True)
elementwise("aten::special_i0e", _i0e_slope, real_only=True, improves="values")
elementwise("aten::special_i1", i1_backward, real_only=True, improves="values")
elementwise("aten::special_i1e", i1e_backward, real_only=True, improves="values")
