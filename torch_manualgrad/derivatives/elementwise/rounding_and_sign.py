"""Rounding and sign functions, which are piecewise constant or linear.

Note:
    Where not differentiable: at jumps, and at 0 for abs, sgn, angle and copysign, where the derivative is 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, elementwise, formula, real, rule

from .strong_times import strong_times


@formula
def sgn_backward(x: Tensor, gx: Tensor, sgn: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $s = x / |x|$: $i s Im(g conj(s)) / |x|$. The tangent is the same function.

    Args:
        x: real or complex.
        gx: cotangent of the result, or tangent of $x$.
        sgn: $s$.

    Returns:
        The shape of ``gx``; zero for real $x$, and at $x = 0$.
    """
    if not x.is_complex():
        return torch.zeros_like(gx)
    return _across(x, gx, sgn, operator.mul)


def _across(x: Tensor, gx: Tensor, sgn: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """$i s Im(g conj(s)) / |x|$; ``times`` multiplies a factor that is linear in $g$ by another one."""
    length = x.abs()
    across = times(times(gx, sgn.conj()).imag, 1 / torch.where(length == 0, inf, length))
    return torch.complex(times(-across, sgn.imag), times(across, sgn.real))


@formula
def angle_backward(grad: Tensor, self: Tensor) -> Tensor:
    """Cotangent of $z$, given that of its angle: $i g z / |z|^2$.

    Args:
        grad: cotangent of the result, real.
        self: $z$, real or complex.

    Returns:
        The shape and dtype of ``self``; zero for real $z$, and at $z = 0$.
    """
    if not self.is_complex():
        return torch.zeros_like(self)
    return grad * _angle_slope(self)


def _angle_slope(self: Tensor) -> Tensor:
    """$i z / |z|^2$, which is $i / conj(z)$; zero at $z = 0$."""
    return torch.where(self == 0, 0, 1j / torch.where(self == 0, 1, self).conj())


def _angle_jvp(self_p: Tensor, self_t: Tensor) -> Tensor:
    """The real part of the tangent times $conj(i z / |z|^2)$."""
    return (self_t * _angle_slope(self_p).conj()).real if self_p.is_complex() else torch.zeros_like(self_t)


@formula
def copysign_tensor_self_backward(grad: Tensor, self: Tensor, result: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $|x|$ with the sign of $y$: $g$ where the signs agree, else $-g$.

    Args:
        grad: cotangent of the result.
        self: $x$, real.
        result: the result.

    Returns:
        The shape of ``grad``; zero at $x = 0$.

    References:
        ATen copysign_tensor_self_backward, which is nan at infinity.
    """
    return grad * (self.sign() * result.sign())


@formula
def frexp_backward(grad: Tensor, exponent: Tensor) -> Tensor:
    """Cotangent of $x$, given that of the mantissa $m$ of $x = m 2^e$: $g 2^-e$. The tangent is the same function.

    Args:
        grad: $g$, cotangent of the mantissa, or tangent of $x$.
        exponent: $e$, of integers.

    Returns:
        The shape and dtype of ``grad``.

    Note:
        Where not differentiable: where the exponent jumps, which counts as constant.

    References:
        ATen derivatives.yaml, which takes the power in float32.
    """
    return grad * torch.exp2(-exponent.to(grad.dtype))


@formula(kernel=("default",))
def complex_sign(x: Tensor) -> Tensor:
    """$x / |x|$ of complex numbers, 0 at 0, whose derivative is finite at 0.

    Args:
        x: complex.

    Returns:
        The shape of ``x``.

    Note:
        Where not differentiable: at 0, where the derivative is 0.

    References:
        ATen sgn, whose second derivative is nan at 0.
    """
    return x.sgn()


@complex_sign.impl_save_for_backward
def _(inputs: Any, output: Tensor) -> Any:
    return inputs.x, output


@complex_sign.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor]:
    return {"x": _across(saved[0], grad, saved[1], strong_times)}


@complex_sign.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor:
    return _across(inputs.x, tangents.x, output, strong_times)


def _sign(x: Tensor) -> Tensor:
    return complex_sign(x) if x.is_complex() else x.sgn()


def _abs_backward(grad: Tensor, self: Tensor) -> Tensor:
    return grad * _sign(self)


def _abs_jvp(self_p: Tensor, self_t: Tensor) -> Tensor:
    sign = _sign(self_p)
    if not sign.is_complex():
        return self_t * sign
    return self_t.real * sign.real + self_t.imag * sign.imag  # no lazily negated part, for which vmap has no rule


for _name in ("aten::ceil", "aten::floor", "aten::round", "aten::trunc", "aten::sign"):
    elementwise(_name, None, real_only=True, finite=True)
elementwise("aten::round.decimals", None, real_only=True, arguments=[{"decimals": 0}], finite=True)
elementwise(
    "aten::frac",
    1,
    real_only=True,
    finite=True,
    improves="values",  # to PyTorch the tangent of the result is that of the input, and a write to one changes both
    defer_to_stock=always,
)
elementwise("aten::fmod.Scalar", 1, real_only=True, arguments=[{"other": 1.7}], finite=True)
elementwise("aten::remainder.Scalar", 1, real_only=True, arguments=[{"other": 1.7}], finite=True)
elementwise(
    "aten::fmod.Tensor",
    {"self": 1, "other": lambda self, other: -torch.div(self, other, rounding_mode="trunc")},
    domain={"other": (0.5, inf)},
    real_only=True,
)
elementwise(
    "aten::remainder.Tensor",
    {"self": 1, "other": lambda self, other: -torch.div(self, other, rounding_mode="floor")},
    domain={"other": (0.5, inf)},
    real_only=True,
)
elementwise("aten::nan_to_num", lambda self: self.isfinite(), real_only=True, arguments=[{}, {"nan": 1.0}], finite=True)
# x and its neighbours differ only by rounding: the slope is 1 also where the arguments are equal. PyTorch has 0 there.
elementwise(
    "aten::nextafter",
    {"self": 1, "other": None},
    real_only=True,
    finite=True,
    improves={"values": None, "missing": "2.13"},
)
elementwise(
    "aten::copysign.Tensor", {"self": copysign_tensor_self_backward, "other": None}, real_only=True, improves="values"
)
elementwise(
    "aten::copysign.Scalar",
    copysign_tensor_self_backward,
    real_only=True,
    arguments=[{"other": -2.0}, {"other": 1.0}],
    improves="values",
)
rule(
    "aten::frexp.Tensor",
    vjp={"self": frexp_backward.bind(grad="grad_mantissa")},
    jvp={"mantissa": frexp_backward.bind(grad="self_t")},
    kind="elementwise",
    improves="values",
    source="ATen derivatives.yaml",
    finite=True,
)
rule(
    "aten::abs",
    vjp={"self": _abs_backward},
    jvp={"result": _abs_jvp},
    kind="elementwise",
    improves="values",  # at 0 of complex numbers
    defer_to_stock=real,
    source="ATen derivatives.yaml",
)
rule(
    "aten::sgn",
    vjp={"self": sgn_backward.bind(x="self", gx="grad", sgn="result")},
    jvp={"result": sgn_backward.bind(x="self_p", gx="self_t", sgn="result")},
    kind="elementwise",
    improves="values",  # at 0 of complex numbers
    defer_to_stock=real,
    source="ATen sgn_backward",
)
rule(
    "aten::angle",
    vjp={"self": angle_backward},
    jvp={"result": _angle_jvp},
    kind="elementwise",
    improves="values",  # at 0 of complex numbers
    defer_to_stock=real,
    source="ATen angle_backward",
)
