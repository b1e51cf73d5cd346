"""Arithmetic: sums, products and quotients, complex numbers from their parts, and angles in degrees.

Where not differentiable: a quotient at a zero divisor, where it is infinite or nan; a rounded quotient at its jumps, where
the derivative is 0; hypot at the origin, where the derivative is 0 by convention and nan in PyTorch.

Args:
    grad: cotangent of the result, real.
    other: $y$, broadcast with $x$; Python callers may give a number.
    self_st: the dtype of $x$. If it is real, so is the result.
    rounding_mode: None, "floor" or "trunc".
"""

from __future__ import annotations

from math import inf, pi

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import Ratio, always, bind, elementwise, formula, where_finite


@formula
def deg2rad_backward(grad: Tensor) -> Tensor:
    """Cotangent of an angle in degrees, given that of the angle in radians: $g pi / 180$.

    Returns:
        The shape of ``grad``.
    """
    return grad * (pi / 180)


@formula
def rad2deg_backward(grad: Tensor) -> Tensor:
    """Cotangent of an angle in radians, given that of the angle in degrees: $g 180 / pi$.

    Returns:
        The shape of ``grad``.
    """
    return grad * (180 / pi)


@formula
def polar_backward(grad: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of length and angle, given that of $z = r e^(i phi)$, $r > 0$: $Re(g conj(z)) / |z|$, $Im(g conj(z))$.

    Args:
        grad: cotangent of the result, complex.
        result: $z$. It does not distinguish $r >= 0$ and $phi$ from $-r$ and $phi + pi$.

    Returns:
        The cotangent of $r$, which is 0 at $z = 0$, and that of $phi$; real, the shape of ``grad``.

    Note:
        The rule of the operator uses $phi$, and is right for $r <= 0$ too.
    """
    along = grad * result.conj()
    length = result.abs()
    return along.real / torch.where(length == 0, inf, length), along.imag


def _over(x: Tensor, y: Tensor, result: Tensor) -> Tensor:
    """$x / result$, with $result^2 = x^2 + y^2$; zero at the origin, in every order.

    Where $x$ is much larger than $y$, the derivative of the quotient would be only rounding error. So it is computed as a
    function of the ratio of the smaller to the larger of the two.
    """
    if not torch.is_grad_enabled():  # nothing differentiates it
        return x / torch.where(result == 0, inf, result)
    x, y = x.to(result.dtype), y.to(result.dtype)  # one may have an integer dtype
    origin, wide = result == 0, x.abs() >= y.abs()
    divisor = torch.where(origin, 1, torch.where(wide, x, y))
    ratio = torch.where(wide, y, x) / divisor
    sign = torch.where(origin, 0, divisor.detach().sgn())
    return torch.where(wide, 1, ratio) * (1 + ratio * ratio).rsqrt() * sign


_ALPHA = [{}, {"alpha": 2.5}]


# -- products and quotients --------------------------------------------------------------------------------------------
@formula
def mul_tensor_backward(grad: Tensor, other: Tensor, self_st: torch.dtype) -> Tensor:
    """Cotangent of $x$, given that of $x y$: $g conj(y)$.

    Args:
        grad: cotangent of the product.

    Returns:
        The shape of ``grad``, not yet summed to that of $x$.
    """
    return _real_if(self_st, grad * _conj(other))


@formula
def div_tensor_self_backward(
    grad: Tensor, other: Tensor, self_st: torch.dtype, rounding_mode: str | None = None
) -> Tensor:
    """Cotangent of $x$, given that of $x / y$: $g / conj(y)$, or zero where the quotient is rounded.

    Args:
        grad: cotangent of the quotient.

    Returns:
        The shape of ``grad``, not yet summed to that of $x$.
    """
    return _real_if(self_st, _of_dividend(grad, other, rounding_mode)).to(self_st)


@formula
def div_tensor_other_backward(grad: Tensor, self: Tensor, other: Tensor, rounding_mode: str | None = None) -> Tensor:
    """Cotangent of $y$, given that of $x / y$: $-g conj(x / y / y)$, or zero where the quotient is rounded.

    Args:
        grad: cotangent of the quotient.
        self: $x$.
        other: $y$, broadcast with $x$.

    Returns:
        The shape of ``grad``, not yet summed to that of $y$; real for a real $y$.
    """
    return _real_if(other.dtype, _of_divisor(grad, self, other, rounding_mode)).to(other.dtype)


def _real_if(dtype: torch.dtype, grad: Tensor) -> Tensor:
    return grad.real if grad.is_complex() and not dtype.is_complex else grad


def _conj(x: Tensor | Number) -> Tensor | Number:
    return x.conj() if isinstance(x, Tensor) else x.conjugate()


def _of_dividend(grad: Tensor, other: Tensor | Number, rounding_mode: str | None = None) -> Tensor:
    return grad / _conj(other) if rounding_mode is None else torch.zeros_like(grad)


def _of_divisor(grad: Tensor, self: Tensor, other: Tensor, rounding_mode: str | None = None) -> Tensor:
    return -grad * (self / other / other).conj() if rounding_mode is None else torch.zeros_like(grad)


def _quotient_tangent(self_t: Tensor | None, other_t: Tensor | None, other_p: Tensor, result: Tensor) -> Tensor:
    """$(t - (x / y) s) / y$, $t$ and $s$ the tangents of $x$ and $y$; $t / y - x s / y^2$ would round twice."""
    if other_t is None:
        assert self_t is not None
        return self_t / other_p
    change = result * other_t
    return (-change if self_t is None else self_t - change) / other_p


# -- the rules --------------------------------------------------------------------------------------------------------

elementwise("aten::neg", -1, finite=True)
elementwise("aten::add.Tensor", {"self": 1, "other": "alpha"}, arguments=_ALPHA, finite=True)
elementwise("aten::add.Scalar", 1, arguments=[{"other": 2.0}], finite=True)
elementwise("aten::sub.Tensor", {"self": 1, "other": lambda alpha: -alpha}, arguments=_ALPHA, finite=True)
elementwise(
    "aten::sub.Scalar",
    1,
    arguments=[{"other": 2.0}],
    finite=True,
    improves="values",  # to PyTorch the tangent of the result is that of the input, and a write to one changes both
    defer_to_stock=always,
)
elementwise("aten::deg2rad", deg2rad_backward, real_only=True, finite=True)
elementwise("aten::rad2deg", rad2deg_backward, real_only=True, finite=True)
elementwise(
    "aten::rsub.Scalar", lambda alpha: -alpha, arguments=[{"other": 2.0}, {"other": 1.0, "alpha": 2.5}], finite=True
)
elementwise("aten::rsub.Tensor", {"self": lambda alpha: -alpha, "other": 1}, arguments=_ALPHA, finite=True)
elementwise(
    "aten::lerp.Scalar",
    {"self": lambda weight: 1 - weight, "end": "weight"},
    arguments=[{"weight": 0.3}, {"weight": 2.0}],
    finite=True,
)
elementwise(
    "aten::lerp.Tensor", {"self": lambda weight: 1 - weight, "end": "weight", "weight": lambda self, end: end - self}
)
elementwise(
    "aten::addcmul",
    {"self": 1, "tensor1": lambda tensor2, value: tensor2 * value, "tensor2": lambda tensor1, value: tensor1 * value},
    arguments=[{}, {"value": 2.5}],
)
elementwise(
    "aten::addcdiv",
    {
        "self": 1,
        "tensor1": lambda tensor2, value: value / tensor2,
        "tensor2": lambda tensor1, tensor2, value: Ratio(-value * (tensor1 / tensor2), tensor2),
    },
    domain={"tensor2": (0.2, inf)},
    arguments=[{}, {"value": 2.5}],
)
elementwise(
    "aten::hypot",
    {"self": bind(_over, x="self", y="other"), "other": bind(_over, x="other", y="self")},
    real_only=True,
    improves="values",
    defer_to_stock=where_finite,
)
elementwise("aten::complex", {"real": 1, "imag": 1j}, real_only=True, finite=True)
elementwise(
    "aten::polar",
    {"abs": lambda angle: torch.polar(torch.ones_like(angle), angle), "angle": lambda result: 1j * result},
    domain={"abs": (0.2, inf)},  # at negative lengths PyTorch is wrong
    real_only=True,
    improves="values",
)
elementwise(
    "aten::ldexp.Tensor",
    {
        "self": lambda grad, other: grad * torch.exp2(other.to(torch.result_type(grad, other))).conj(),
        "other": lambda result: result * 0.6931471805599453,
    },
    improves={"values": "2.15"},  # PyTorch's 2^n of a negative integer n is zero
    since="2.13",  # composed of other operators before
)
elementwise("aten::mul.Tensor", {"self": "other", "other": "self"})
elementwise("aten::mul.Scalar", "other", arguments=[{"other": 2.5}])
elementwise(
    "aten::div.Tensor",
    {"self": bind(_of_dividend, rounding_mode=None), "other": bind(_of_divisor, rounding_mode=None)},
    domain={"other": (0.2, inf)},
    tangent=_quotient_tangent,
)
elementwise("aten::div.Scalar", bind(_of_dividend, rounding_mode=None), arguments=[{"other": 2.5}])
elementwise(
    "aten::div.Tensor_mode",
    {"self": _of_dividend, "other": _of_divisor},
    domain={"other": (0.2, inf)},
    real_only=True,
    arguments=[{"rounding_mode": None}, {"rounding_mode": "floor"}, {"rounding_mode": "trunc"}],
)
elementwise(
    "aten::div.Scalar_mode",
    _of_dividend,
    real_only=True,
    arguments=[{"other": 1.7, "rounding_mode": mode} for mode in (None, "floor", "trunc")],
)
