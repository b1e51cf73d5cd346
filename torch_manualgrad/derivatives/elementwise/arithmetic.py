"""Arithmetic: combinations of tensors that are linear in each, complex numbers from their parts, and angles in degrees.

Note:
    Where not differentiable: for hypot at the origin, where the derivative is 0 by convention; PyTorch's is nan.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, pi

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Ratio, Sample, elementwise, formula, where_finite


@formula
def deg2rad_backward(grad: Tensor) -> Tensor:
    """Cotangent of an angle in degrees, given that of it in radians: g pi / 180.

    Args:
        grad: cotangent of the result, real.

    Returns:
        The shape of ``grad``.

    References:
        ATen deg2rad_backward.
    """
    return grad * (pi / 180)


@formula
def rad2deg_backward(grad: Tensor) -> Tensor:
    """Cotangent of an angle in radians, given that of it in degrees: g 180 / pi.

    Args:
        grad: cotangent of the result, real.

    Returns:
        The shape of ``grad``.

    References:
        ATen rad2deg_backward.
    """
    return grad * (180 / pi)


@formula
def polar_backward(grad: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of length and angle, given that of z = r exp(i phi), r > 0: Re(g conj(z)) / |z| and Im(g conj(z)).

    Args:
        grad: cotangent of the result, complex.
        result: z, of which r >= 0 cannot be told from -r and phi + pi.

    Returns:
        The cotangent of r, which is 0 at z = 0, and that of phi; real, the shape of ``grad``.

    Note:
        The rule of the operator knows phi, and is right for r <= 0 too.

    References:
        ATen polar_backward.
    """
    along = grad * result.conj()
    length = result.abs()
    return along.real / torch.where(length == 0, inf, length), along.imag


def _over(x: Tensor, y: Tensor, result: Tensor) -> Tensor:
    """x / result, with result^2 = x^2 + y^2; zero at the origin, in every order.

    Where x is much larger than y, the derivative of the quotient is all rounding. As a function of the ratio of the smaller to
    the larger of the two it is not.
    """
    if not torch.is_grad_enabled():  # nothing differentiates it
        return x / torch.where(result == 0, inf, result)
    x, y = x.to(result.dtype), y.to(result.dtype)  # one may be of integers
    origin, wide = result == 0, x.abs() >= y.abs()
    divisor = torch.where(origin, 1, torch.where(wide, x, y))
    ratio = torch.where(wide, y, x) / divisor
    sign = torch.where(origin, 0, divisor.detach().sgn())
    return torch.where(wide, 1, ratio) * (1 + ratio * ratio).rsqrt() * sign


_ALPHA = [{}, {"alpha": 2.5}]

elementwise("aten::neg", lambda: -1, finite=True)
elementwise("aten::add.Tensor", {"self": lambda: 1, "other": lambda alpha: alpha}, arguments=_ALPHA, finite=True)
elementwise("aten::add.Scalar", lambda: 1, arguments=[{"other": 2.0}], finite=True)
elementwise("aten::sub.Tensor", {"self": lambda: 1, "other": lambda alpha: -alpha}, arguments=_ALPHA, finite=True)
elementwise("aten::sub.Scalar", lambda: 1, arguments=[{"other": 2.0}], finite=True)
elementwise("aten::deg2rad", deg2rad_backward, real_only=True, finite=True)
elementwise("aten::rad2deg", rad2deg_backward, real_only=True, finite=True)
elementwise(
    "aten::rsub.Scalar", lambda alpha: -alpha, arguments=[{"other": 2.0}, {"other": 1.0, "alpha": 2.5}], finite=True
)
elementwise("aten::rsub.Tensor", {"self": lambda alpha: -alpha, "other": lambda: 1}, arguments=_ALPHA, finite=True)
elementwise(
    "aten::lerp.Scalar",
    {"self": lambda weight: 1 - weight, "end": lambda weight: weight},
    arguments=[{"weight": 0.3}, {"weight": 2.0}],
    finite=True,
)
elementwise(
    "aten::lerp.Tensor",
    {"self": lambda weight: 1 - weight, "end": lambda weight: weight, "weight": lambda self, end: end - self},
)
elementwise(
    "aten::addcmul",
    {
        "self": lambda: 1,
        "tensor1": lambda tensor2, value: tensor2 * value,
        "tensor2": lambda tensor1, value: tensor1 * value,
    },
    arguments=[{}, {"value": 2.5}],
)
elementwise(
    "aten::addcdiv",
    {
        "self": lambda: 1,
        "tensor1": lambda tensor2, value: value / tensor2,
        "tensor2": lambda tensor1, tensor2, value: Ratio(-value * (tensor1 / tensor2), tensor2),
    },
    domain={"tensor2": (0.2, inf)},
    arguments=[{}, {"value": 2.5}],
)
elementwise(
    "aten::hypot",
    {
        "self": lambda self, other, result: _over(self, other, result),
        "other": lambda self, other, result: _over(other, self, result),
    },
    real_only=True,
    improves="values",
    defer_to_stock=where_finite,
)
elementwise("aten::complex", {"real": lambda: 1, "imag": lambda: 1j}, real_only=True, finite=True)
elementwise(
    "aten::polar",
    {"abs": lambda angle: torch.polar(torch.ones_like(angle), angle), "angle": lambda result: 1j * result},
    domain={"abs": (0.2, inf)},  # at negative lengths PyTorch is wrong
    real_only=True,
    improves="values",
)


def _ldexp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.tensor([0.45, -1.7, 0.6]).to(device, dtype)
    if not dtype.is_complex:
        yield Sample(x, torch.tensor([[-1.5], [0.4]]).to(device, dtype))
    yield Sample(x, torch.tensor([-2, 3, 1], dtype=torch.int32, device=device))


elementwise(
    "aten::ldexp.Tensor",
    {
        "self": lambda grad, other: grad * torch.exp2(other.to(torch.result_type(grad, other))).conj(),
        "other": lambda result: result * 0.6931471805599453,
    },
    improves={"values": "2.15"},  # PyTorch's 2^n of a negative integer n is zero
    samples=_ldexp_samples,
    since="2.13",  # made of others before
)
