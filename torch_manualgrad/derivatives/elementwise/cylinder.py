"""Bessel functions through which PyTorch returns no gradient: its results have no history, and no error says so.

The derivative of each is made of the function itself and its neighbour:

    J0' = -J1,  J1' = J0 - J1 / x;    Y0' = -Y1,  Y1' = Y0 - Y1 / x;
    I0' = I1,   I1' = I0 - I1 / x;    K0' = -K1,  K1' = -K0 - K1 / x,

so that each function is a formula too, and every order is one of these. Those of $J1$ and $I1$ are power series near
zero. The scaled $k0$ and $k1$ are $exp(x) K0$ and $exp(x) K1$, whose derivatives far from zero are differences of
nearly equal numbers: there they are the derivative of the asymptotic series.

Args:
    self: $x$, real.

Note:
    Where not differentiable: at $x = 0$, for the functions of the second kind: $Y$ and $K$.

References:
    DLMF 10.6.2 and 10.29.2, https://dlmf.nist.gov/10.6.E2; for the series DLMF 10.2.2, 10.25.2 and 10.40.2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial, pi, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Formula, elementwise, formula

from .bessel import i1_backward, sinc_backward
from .series import polynomial
from .strong_times import strong_times

_NEAR, _FAR = 2.0, 32.0
_J1 = [(-1) ** k * (2 * k + 1) / (2 * factorial(k) * factorial(k + 1)) for k in range(18)]  # J1'(x), by (x / 2)^(2 k)
_K0, _K1 = (
    # the derivative of exp(x) K_n(x), by x^(-k - 3/2)
    [
        -(k + 0.5) * sqrt(pi / 2) * prod((4 * n * n - (2 * j - 1) ** 2) / (8 * j) for j in range(1, k + 1))
        for k in range(20)
    ]
    for n in (0, 1)
)


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
    """
    return torch.special.bessel_y0(self)


@formula(kernel=("default",))
def bessel_y1(self: Tensor) -> Tensor:
    """$Y_1(x)$.

    Returns:
        The shape of ``self``; nan where $x < 0$.
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
    """
    return torch.special.modified_bessel_k0(self)


@formula(kernel=("default",))
def modified_bessel_k1(self: Tensor) -> Tensor:
    """$K_1(x)$.

    Returns:
        The shape of ``self``; nan where $x < 0$.
    """
    return torch.special.modified_bessel_k1(self)


@formula(kernel=("default",))
def scaled_modified_bessel_k0(x: Tensor) -> Tensor:
    """$exp(x) K_0(x)$.

    Args:
        x: real.

    Returns:
        The shape of ``x``; nan where $x < 0$.
    """
    return torch.special.scaled_modified_bessel_k0(x)


@formula(kernel=("default",))
def scaled_modified_bessel_k1(x: Tensor) -> Tensor:
    """$exp(x) K_1(x)$.

    Args:
        x: real.

    Returns:
        The shape of ``x``; nan where $x < 0$.
    """
    return torch.special.scaled_modified_bessel_k1(x)


def _j1_slope(x: Tensor) -> Tensor:
    near = x.abs() < _NEAR
    small, large = torch.where(near, x, 0), torch.where(near, 1, x)
    return torch.where(near, polynomial(_J1, small * small / 4), bessel_j0(large) - bessel_j1(large) / large)


def _scaled_slope(near: Callable[[Tensor], Tensor], coefficients: list[float]) -> Callable[[Tensor], Tensor]:
    def slope(x: Tensor) -> Tensor:
        far = x > _FAR
        large = torch.where(far, x, _FAR)
        inverse = 1 / torch.where(large.isinf(), torch.finfo(x.dtype).max, large)
        series = inverse * inverse.sqrt() * polynomial(coefficients, inverse)
        return torch.where(far, series, near(torch.where(far, 1, x)))

    return slope


_scaled_k0_slope = _scaled_slope(lambda x: scaled_modified_bessel_k0(x) - scaled_modified_bessel_k1(x), _K0)
_scaled_k1_slope = _scaled_slope(
    lambda x: scaled_modified_bessel_k1(x) * (1 - 1 / x) - scaled_modified_bessel_k0(x), _K1
)


def _enter(name: str, slope: Callable[[Tensor], Tensor], domain: tuple[float, float] = (-4, 4)) -> None:
    """The rule of an operator. Its argument is called self or $x$."""
    bound: Callable[..., Tensor] = (lambda x: slope(x)) if name.startswith(("sc", "sp")) else (lambda self: slope(self))
    elementwise(
        f"aten::special_{name}",
        bound,
        domain=domain,
        real_only=True,
        improves="values",
        source="DLMF 10.6.2, 10.29.2, https://dlmf.nist.gov/10.6.E2",
    )


def _differentiable(value: Formula, slope: Callable[[Tensor], Tensor], domain: tuple[float, float] = (-4, 4)) -> None:
    """Give a formula and the operator that it stands for their derivative."""
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

    _enter(name, slope, domain)


_POSITIVE = (0.2, 4.0)

_differentiable(bessel_j0, lambda x: -bessel_j1(x))
_differentiable(bessel_j1, _j1_slope)
_differentiable(bessel_y0, lambda x: -bessel_y1(x), _POSITIVE)
_differentiable(bessel_y1, lambda x: bessel_y0(x) - bessel_y1(x) / x, _POSITIVE)
_differentiable(modified_bessel_i1, lambda x: i1_backward(torch.ones_like(x), x, modified_bessel_i1(x)))
_differentiable(modified_bessel_k0, lambda x: -modified_bessel_k1(x), _POSITIVE)
_differentiable(modified_bessel_k1, lambda x: -modified_bessel_k0(x) - modified_bessel_k1(x) / x, _POSITIVE)
_differentiable(scaled_modified_bessel_k0, _scaled_k0_slope, _POSITIVE)
_differentiable(scaled_modified_bessel_k1, _scaled_k1_slope, _POSITIVE)
_enter("modified_bessel_i0", modified_bessel_i1)
_enter("spherical_bessel_j0", lambda x: sinc_backward(torch.ones_like(x), x / pi) / pi)
