"""Bessel functions, and sinc: most of their derivatives divide by $x$.

The derivative of each Bessel function is made of the function itself and its neighbour:

    J0' = -J1,  J1' = J0 - J1 / x;    Y0' = -Y1,  Y1' = Y0 - Y1 / x;
    I0' = I1,   I1' = I0 - I1 / x;    K0' = -K1,  K1' = -K0 - K1 / x.

Near zero, the derivatives of sinc, $I1$ and $J1$ are power series, so every order is finite and right there. PyTorch's
derivatives of sinc and $I1$ are nan, zero or noise from the second order on. ``i0e`` and ``i1e`` are $exp(-|x|) I0$ and
$exp(-|x|) I1$; the scaled ``k0`` and ``k1`` are $exp(x) K0$ and $exp(x) K1$. Far from zero, their derivatives are
differences of nearly equal numbers, which PyTorch returns as 0 or as noise for ``i0e`` and ``i1e``. Here they are the
derivatives of asymptotic series, and those of the scaled functions integrals of positive functions.

Before torch 2.15, PyTorch returns gradients only through ``sinc``, ``i0``, ``i0e``, ``i1`` and ``i1e``. The results of the
other functions have no history, and no error is raised. Since 2.15, that still holds for the scaled functions and the spherical
one, and the third derivatives of $J1$ and $I1$ are 0 or noise near zero. Each of these functions is a formula too, and
derivatives of every order consist of these formulas.

Where not differentiable: for ``i0e`` at 0, and for ``i1e`` at 0 from the second order on, where the sign of $x$ counts
as 0.

Args:
    grad: cotangent of the result.
    self: $x$, real.

References:
    DLMF 10.6.2 and 10.29.2, https://dlmf.nist.gov/10.6.E2; for the series DLMF 10.2.2, 10.25.2 and 10.40.2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, factorial, pi, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Formula, elementwise, formula

from .series import polynomial
from .strong_times import strong_times

_NEAR = 2.0  # the series is used for |pi x| (sinc) or |x| (i1) below this; its last terms are below 1e-20 there
_SINC = [(-1) ** k * 2 * k / factorial(2 * k + 1) for k in range(1, 18)]  # sinc'(x) / pi, with y = pi x, by y^(2 k - 1)
_I1 = [(2 * k + 1) / (2 * factorial(k) * factorial(k + 1)) for k in range(18)]  # i1'(x), by (x / 2)^(2 k)
_FAR = 32.0  # from here on exp(-x) I_n(x) is an asymptotic series, whose terms fall below 1e-17
_FAR_I0E, _FAR_I1E = (
    # the derivative of exp(-x) I_n(x), by x^(-k - 3/2)
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
    turns = 2 * ((self.real if self.is_complex() else self).detach() / 2).round()  # exact, unlike pi x
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
        ATen i1e_backward; near zero, as `i1_backward`; far from zero, DLMF 10.40.1, https://dlmf.nist.gov/10.40.E1.
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


# -- functions without a gradient in PyTorch ---------------------------------------------------------------------------

_J1 = [(-1) ** k * (2 * k + 1) / (2 * factorial(k) * factorial(k + 1)) for k in range(18)]  # J1'(x), by (x / 2)^(2 k)
_STEP = 0.15
_NODES = [_STEP * k for k in range(1, 45)]  # of the trapezoidal rule for a Gaussian; the next terms are below 1e-17
_SQUARES = [(v * v, 2 * _STEP * v * v * exp(-v * v)) for v in _NODES]  # with their weights


@formula(kernel=("default",))
def bessel_j0(self: Tensor) -> Tensor:
    """$J_0(x)$.

    Returns:
        The shape of ``self``.
    """
    return torch.special.bessel_j0(self)


@formula(kernel=("default",))
def bessel_j1(self: Tensor) -> Tensor:
    """$J_1(x)$.

    Returns:
        The shape of ``self``.
    """
    return torch.special.bessel_j1(self)


@formula(kernel=("default",))
def bessel_y0(self: Tensor) -> Tensor:
    """$Y_0(x)$.

    Returns:
        The shape of ``self``; nan where $x < 0$.

    Note:
        Where not differentiable: at $x = 0$.
    """
    return torch.special.bessel_y0(self)


@formula(kernel=("default",))
def bessel_y1(self: Tensor) -> Tensor:
    """$Y_1(x)$.

    Returns:
        The shape of ``self``; nan where $x < 0$.

    Note:
        Where not differentiable: at $x = 0$.
    """
    return torch.special.bessel_y1(self)


@formula(kernel=("default",))
def modified_bessel_i1(self: Tensor) -> Tensor:
    """$I_1(x)$.

    Returns:
        The shape of ``self``.
    """
    return torch.special.modified_bessel_i1(self)


@formula(kernel=("default",))
def modified_bessel_k0(self: Tensor) -> Tensor:
    """$K_0(x)$.

    Returns:
        The shape of ``self``; nan where $x < 0$.

    Note:
        Where not differentiable: at $x = 0$.
    """
    return torch.special.modified_bessel_k0(self)


@formula(kernel=("default",))
def modified_bessel_k1(self: Tensor) -> Tensor:
    """$K_1(x)$.

    Returns:
        The shape of ``self``; nan where $x < 0$.

    Note:
        Where not differentiable: at $x = 0$.
    """
    return torch.special.modified_bessel_k1(self)


@formula(kernel=("default",))
def scaled_modified_bessel_k0(x: Tensor) -> Tensor:
    """$exp(x) K_0(x)$.

    Args:
        x: real.

    Returns:
        The shape of ``x``; nan where $x < 0$.

    Note:
        Where not differentiable: at $x = 0$.
    """
    return torch.special.scaled_modified_bessel_k0(x)


@formula(kernel=("default",))
def scaled_modified_bessel_k1(x: Tensor) -> Tensor:
    """$exp(x) K_1(x)$.

    Args:
        x: real.

    Returns:
        The shape of ``x``; nan where $x < 0$.

    Note:
        Where not differentiable: at $x = 0$.
    """
    return torch.special.scaled_modified_bessel_k1(x)


def _j1_slope(x: Tensor) -> Tensor:
    near, small, large = _split(x)
    return torch.where(near, polynomial(_J1, small * small / 4), bessel_j0(large) - bessel_j1(large) / large)


def _off_zero(x: Tensor) -> Tensor:
    """$x$, with 1 for 0: there, the pole of a function of order 1 dominates the function of order 0 that is added to it."""
    return torch.where(x == 0, 1, x)


def _scaled_slope(order: int, near: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The derivative of $exp(x) K_n(x)$ for $n$ = 0 or 1; ``near`` computes it near zero.

    With $cosh(t) = 1 + v^2 / x$, DLMF 10.32.9 is the integral of $2 (1 + n v^2 / x) exp(-v^2) / sqrt(v^2 + 2 x)$ over
    $v > 0$, and the derivative that of $-(v^2 / x) ...$. All terms have one sign in every derivative, so that nothing
    cancels; the trapezoidal rule has an error of $exp(2 x - 2 pi sqrt(2 x) / h)$ for the step $h$.
    """

    def slope(x: Tensor) -> Tensor:
        far = x >= 0.5
        small, large = torch.where(far, 1, x), torch.where(far, x, 1).clamp(max=torch.finfo(x.dtype).max / 4)
        total = torch.zeros_like(large)
        for square, weight in _SQUARES:
            total = total + weight * (1 + order * square / large) * (square + 2 * large).rsqrt()
        return torch.where(far, -total / large, near(small))

    return slope


_scaled_k0_slope = _scaled_slope(0, lambda x: scaled_modified_bessel_k0(_off_zero(x)) - scaled_modified_bessel_k1(x))
_scaled_k1_slope = _scaled_slope(
    1, lambda x: scaled_modified_bessel_k1(x) * (1 - 1 / x.abs()) - scaled_modified_bessel_k0(_off_zero(x))
)


def _spherical_j0_slope(x: Tensor) -> Tensor:
    near, small, large = _split(x)
    series = small * polynomial(_SINC, small * small)
    return torch.where(near, series, (large.cos() - large.sin() / large) / large)


def _enter(
    name: str,
    slope: Callable[[Tensor], Tensor],
    domain: tuple[float, float] = (-4, 4),
    right_since: str | None = None,
) -> None:
    """Register the rule of an operator. Its argument is called self or $x$."""
    bound: Callable[..., Tensor] = (lambda x: slope(x)) if name.startswith(("sc", "sp")) else (lambda self: slope(self))
    elementwise(
        f"aten::special_{name}",
        bound,
        domain=domain,
        real_only=True,
        improves={"values": right_since},
        source="DLMF 10.6.2, 10.29.2, https://dlmf.nist.gov/10.6.E2",
    )


def _differentiable(value: Formula, slope: Callable[[Tensor], Tensor], *about: Any) -> None:
    """Define the derivative of a formula and of its operator."""
    (argument,) = value.signature.names
    name = value.__name__
    value.impl("default")(getattr(torch.special, name))

    @value.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        return tuple(inputs)

    # strong products: the second derivative of an operator is the first of its neighbour
    @value.impl_backward
    def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
        return {argument: strong_times(grad, slope(*saved))}

    @value.impl_jvp
    def _(inputs: Any, output: Any, tangents: Any) -> Any:
        return strong_times(tangents[0], slope(inputs[0]))

    _enter(name, slope, *about)


_POSITIVE = (0.2, 4.0)

_differentiable(bessel_j0, lambda x: -bessel_j1(x))
_differentiable(bessel_j1, _j1_slope)
_differentiable(bessel_y0, lambda x: -bessel_y1(x), _POSITIVE, "2.15")
_differentiable(bessel_y1, lambda x: bessel_y0(_off_zero(x)) - bessel_y1(x) / x.abs(), _POSITIVE, "2.15")
_differentiable(modified_bessel_i1, lambda x: i1_backward(torch.ones_like(x), x, modified_bessel_i1(x)))
_differentiable(modified_bessel_k0, lambda x: -modified_bessel_k1(x), _POSITIVE, "2.15")
_differentiable(
    modified_bessel_k1,
    lambda x: -modified_bessel_k0(_off_zero(x)) - modified_bessel_k1(x) / x.abs(),
    _POSITIVE,
    "2.15",
)
_differentiable(scaled_modified_bessel_k0, _scaled_k0_slope, _POSITIVE)
_differentiable(scaled_modified_bessel_k1, _scaled_k1_slope, _POSITIVE)
_enter("modified_bessel_i0", modified_bessel_i1)
_enter("spherical_bessel_j0", _spherical_j0_slope)
