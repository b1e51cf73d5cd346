"""Products and quotients, of tensors and of a tensor and a number.

Note:
    Where not differentiable: a quotient at a zero divisor, where it is infinite or nan; a rounded one where it jumps,
    where the derivative is 0.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import elementwise, formula


@formula
def mul_tensor_backward(grad: Tensor, other: Tensor, self_st: torch.dtype) -> Tensor:
    """Cotangent of x, given that of x y: g conj(y).

    Args:
        grad: cotangent of the product.
        other: y, broadcast with x; Python callers may give a number.
        self_st: the dtype of x. If it is real, so is what is returned.

    Returns:
        The shape of ``grad``, not yet summed to that of x.

    References:
        ATen mul_tensor_backward.
    """
    return _real_if(self_st, grad * _conj(other))


@formula
def div_tensor_self_backward(
    grad: Tensor, other: Tensor, self_st: torch.dtype, rounding_mode: str | None = None
) -> Tensor:
    """Cotangent of x, given that of x / y: g / conj(y), or zero where the quotient is rounded.

    Args:
        grad: cotangent of the quotient.
        other: y, broadcast with x; Python callers may give a number.
        self_st: the dtype of x. If it is real, so is what is returned.
        rounding_mode: None, "floor" or "trunc".

    Returns:
        The shape of ``grad``, not yet summed to that of x.

    References:
        ATen div_tensor_self_backward.
    """
    return _real_if(self_st, _of_dividend(grad, other, rounding_mode)).to(self_st)


@formula
def div_tensor_other_backward(grad: Tensor, self: Tensor, other: Tensor, rounding_mode: str | None = None) -> Tensor:
    """Cotangent of y, given that of x / y: -g conj(x / y / y), or zero where the quotient is rounded.

    Args:
        grad: cotangent of the quotient.
        self: x.
        other: y, broadcast with x.
        rounding_mode: None, "floor" or "trunc".

    Returns:
        The shape of ``grad``, not yet summed to that of y; real for a real y.

    References:
        ATen div_tensor_other_backward.
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


elementwise("aten::mul.Tensor", {"self": lambda other: other, "other": lambda self: self})
elementwise("aten::mul.Scalar", lambda other: other, arguments=[{"other": 2.5}])


def _quotient_tangent(self_t: Tensor | None, other_t: Tensor | None, other_p: Tensor, result: Tensor) -> Tensor:
    """(t - (x / y) s) / y, with t and s the tangents of x and y: their difference first, as t / y - x s / y^2 rounds twice."""
    if other_t is None:
        assert self_t is not None
        return self_t / other_p
    change = result * other_t
    return (-change if self_t is None else self_t - change) / other_p


elementwise(
    "aten::div.Tensor",
    {
        "self": lambda grad, other: _of_dividend(grad, other),
        "other": lambda grad, self, other: _of_divisor(grad, self, other),
    },
    domain={"other": (0.2, inf)},
    tangent=_quotient_tangent,
)
elementwise(
    "aten::div.Scalar",
    lambda grad, other: _of_dividend(grad, other),
    arguments=[{"other": 2.5}],
)
elementwise(
    "aten::div.Tensor_mode",
    {
        "self": lambda grad, other, rounding_mode: _of_dividend(grad, other, rounding_mode),
        "other": lambda grad, self, other, rounding_mode: _of_divisor(grad, self, other, rounding_mode),
    },
    domain={"other": (0.2, inf)},
    real_only=True,
    arguments=[{"rounding_mode": None}, {"rounding_mode": "floor"}, {"rounding_mode": "trunc"}],
)
elementwise(
    "aten::div.Scalar_mode",
    lambda grad, other, rounding_mode: _of_dividend(grad, other, rounding_mode),
    real_only=True,
    arguments=[{"other": 1.7, "rounding_mode": mode} for mode in (None, "floor", "trunc")],
)
