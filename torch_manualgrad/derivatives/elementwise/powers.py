"""Exponentials, logarithms, roots and powers.

Args:
    grad: cotangent of the result.
    self: $x$, real or complex.
    exponent: $y$, broadcast with $x$.

Note:
    Where not differentiable: at zero for the logarithms, the roots and the reciprocal, where the derivative is
    infinite, or nan for a cotangent of zero, as in PyTorch. For powers, the derivative is 0 in the base at
    $x^0$ and in the exponent at $0^y$ with $Re y > 0$ or $y = 0$. The power is constant there, so all orders are 0.
    PyTorch's first order is the same for real $y$; its second order is nan.
"""

from __future__ import annotations

import cmath
from math import inf, log, nan

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import Ratio, elementwise, formula, where_finite


@formula
def log1p_backward(grad: Tensor, self: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $log(1 + x)$: $g / conj(1 + x)$.

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at $x = -1$, where it is infinite.
    """
    return grad / (1 + self).conj()


@formula
def pow_backward(grad: Tensor, self: Tensor, exponent: Number) -> Tensor:
    """Cotangent of $x$, given that of $x^y$ for a number $y$: $g conj(y x^(y - 1))$.

    Args:
        exponent: $y$.

    Returns:
        The shape of ``grad``; zero for $y = 0$.

    Note:
        Where not differentiable: at $x = 0$ for $y < 1$, where it is infinite.
    """
    return torch.zeros_like(grad) if exponent == 0 else grad * (exponent * self.pow(exponent - 1)).conj()


@formula
def pow_backward_self(grad: Tensor, self: Tensor, exponent: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $x^y$: $g conj(y x^(y - 1))$.

    Returns:
        The shape of ``grad``, not yet summed to that of $x$; zero where $y = 0$.

    Note:
        Where not differentiable: at $x = 0$ for $0 < y < 1$ and $y < 0$, where it is infinite.
    """
    exponent = _in(grad.dtype, exponent)
    # 0^y is constant in y, for the mixed derivative too
    exponent = torch.where((self == 0) & _is_power_of_zero(exponent), exponent.detach(), exponent)
    # the constant x^0 at zero and nan; elsewhere its mixed derivative 1 / x is kept
    constant = (exponent == 0) & ~(self.abs() > 0)
    if self.is_complex() or exponent.is_complex():  # complex 0^0 is nan in PyTorch
        constant = constant | (exponent == 1) & (self == 0)
    return grad * (exponent * torch.where(constant, 1, self).pow(exponent - 1)).conj()


@formula
def pow_backward_exponent(grad: Tensor, self: Tensor, exponent: Tensor, result: Tensor) -> Tensor:
    """Cotangent of $y$, given that of $x^y$: $g conj(x^y log x)$.

    Args:
        self: $x$, real or complex; Python callers may give a number.
        result: $x^y$.

    Returns:
        The shape of ``grad``, not yet summed to that of $y$; zero at $x = 0$ with $Re y > 0$ or $y = 0$, nan at $x < 0$
        if the result is real.
    """
    constant = _is_power_of_zero(exponent)
    if isinstance(self, Tensor):
        constant = (self == 0) & constant
        base = torch.where(constant, 1, self)
        # a negative real base has a complex logarithm, and complex 0^0 is nan in PyTorch
        base = base.to(result.dtype) if result.is_complex() else _in(result.dtype, base)
        return grad * (torch.where(constant, 0, result) * base.log()).conj()
    if self == 0:
        return grad * (result * torch.where(constant, 0, -inf).to(result.dtype)).conj()
    return grad * (result * _log(self, complex_result=result.is_complex())).conj()


def _is_power_of_zero(exponent: Tensor) -> Tensor:
    """Whether $0^y$ is finite: $Re y > 0$ or $y = 0$."""
    return (exponent.real > 0) | (exponent == 0) if exponent.is_complex() else exponent >= 0


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """An integer in this dtype: the logarithm of integers has single precision, and unsigned ones are never negative."""
    return x if x.is_floating_point() or x.is_complex() else x.to(dtype)


def _log(base: Number, *, complex_result: bool) -> complex | float:
    found = cmath.log(base)
    return found if complex_result else found.real if found.imag == 0 else nan


elementwise("aten::exp", "result")
elementwise("aten::exp2", lambda result: result * log(2))
elementwise("aten::expm1", lambda result: result + 1)
elementwise("aten::log", lambda self: Ratio(1, self), domain=(0, inf))
elementwise("aten::log2", lambda self: Ratio(1, self * log(2)), domain=(0, inf))
elementwise("aten::log10", lambda self: Ratio(1, self * log(10)), domain=(0, inf))
elementwise("aten::log1p", log1p_backward, domain=(-1, inf))
elementwise("aten::sqrt", lambda result: Ratio(1, 2 * result), domain=(0, inf))
elementwise("aten::rsqrt", lambda result: -0.5 * result.pow(3), domain=(0, inf))
# the square may leave the range where the product does not
elementwise("aten::reciprocal", lambda grad, result: -grad * result.conj() * result.conj())
elementwise(
    "aten::pow.Tensor_Scalar",
    pow_backward,
    domain=(0, inf),
    arguments=[{"exponent": 2.5}, {"exponent": 3}, {"exponent": 0}, {"exponent": -1.0}],
)
elementwise(
    "aten::pow.Tensor_Tensor",
    {"self": pow_backward_self, "exponent": pow_backward_exponent},
    domain={"self": (0, inf)},
    improves="values",
    defer_to_stock=where_finite,
)
elementwise(
    "aten::pow.Scalar",
    pow_backward_exponent,
    arguments=[{"self": 2.5}, {"self": 1}],
    improves="values",
    defer_to_stock=where_finite,
)
