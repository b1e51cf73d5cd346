"""Fake quantization: $y = s (q - z)$, with $q = round(x / s + z)$ clamped to a range of integers.

Its derivative is 0 or does not exist. By convention, the straight-through estimate is used instead. With constant $s$
and $z$, it is 1 where $q$ is inside its range, else 0, in every mode; all further orders are 0.

If the scale $s$ and the zero point $z$ are learned, the estimate treats the change by rounding, $d = q - (x / s + z)$,
as a constant. So $y = x + s d$ where $q$ is inside its range, and $y = s (q - z)$ where $q$ is a bound. This function
is differentiated, in every mode and order. Only the derivatives in $s$ and $z$ are multiplied by ``grad_factor``, in
forward mode too.

Args:
    self: $x$, real.
    scale: $s$, one number, or one for each index of $x$ along the axis.
    zero_point: $z$, the shape of ``scale``; it is rounded, and clamped to the range.
    quant_min, quant_max: the range of $q$.
    grad_factor: the factor of the derivatives in $s$ and $z$.
    axis: the axis of $x$, or None if ``scale`` is one number.

References:
    Bengio, Leonard, Courville, Estimating or propagating gradients through stochastic neurons, arXiv:1308.3432. Esser et
    al., Learned step size quantization, arXiv:1902.08153, equations 3 and 5. ATen
    _fake_quantize_learnable_per_tensor_affine_backward, which is for float32, and has no derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, formula, rule


@formula
def fake_quantize_cachemask_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """Cotangent of $x$, given that of the quantized $x$: $g$ inside the range. The tangent is the same function.

    Args:
        grad: $g$, cotangent of the result, or tangent of $x$.
        mask: bool, whether the rounded number is inside of the range.

    Returns:
        The shape of ``grad``.

    References:
        ATen fake_quantize_per_tensor_affine_cachemask_backward, fake_quantize_per_channel_affine_cachemask_backward.
    """
    return grad * mask


# -- a scale and a zero point that are learned ----------------------------------------------------------------------------
def slopes(
    self: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives in $x$, $s$ and $z$: True, $d$ and 0 where $q$ is inside its range; else False, bound $- z$ and $-s$."""
    x, s = self.detach(), scale.detach()
    z = zero_point.detach().round().clamp(quant_min, quant_max)
    q = (x * (1 / s) + z).round()
    inside = (q >= quant_min) & (q <= quant_max)
    bound = q.clamp(quant_min, quant_max) - (z + (zero_point - zero_point.detach()))
    return inside, torch.where(inside, q - z - x / s, bound), torch.where(inside, 0, -scale)


def along(parameter: Tensor, self: Tensor, axis: int | None) -> Tensor:
    """One number for all of $x$, or for each of its indices along the axis."""
    if axis is None:
        return parameter.reshape(())
    sizes = [1] * self.dim()
    sizes[axis] = -1
    return parameter.reshape(sizes)


@formula
def fake_quantize_learnable_backward(
    grad: Tensor,
    self: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    grad_factor: float,
    axis: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, $s$ and $z$, given that of $s (q - z)$, by the straight-through estimate.

    Args:
        grad: cotangent of the result.

    Returns:
        The shapes of ``self``, ``scale`` and ``zero_point``.

    References:
        ATen _fake_quantize_learnable_per_tensor_affine_backward.
    """
    s, z = along(scale, self, axis), along(zero_point, self, axis)
    inside, in_s, in_z = slopes(self, s, z, quant_min, quant_max)
    grad_scale, grad_zero_point = (
        ((grad * slope).sum_to_size(s.shape) * grad_factor).reshape(p.shape).to(p.dtype)
        for slope, p in ((in_s, scale), (in_z, zero_point))
    )
    return (grad * inside).to(self.dtype), grad_scale, grad_zero_point


@formula
def fake_quantize_learnable_jvp(
    self: Tensor,
    self_t: Tensor | None,
    scale: Tensor,
    scale_t: Tensor | None,
    zero_point: Tensor,
    zero_point_t: Tensor | None,
    quant_min: int,
    quant_max: int,
    grad_factor: float,
    axis: int | None = None,
) -> Tensor:
    """Tangent of $s (q - z)$, by the straight-through estimate: the adjoint of `fake_quantize_learnable_backward`.

    Args:
        self_t, scale_t, zero_point_t: tangents; None for zero.

    Returns:
        The shape of ``self``.

    References:
        The same as for `fake_quantize_learnable_backward`.
    """
    s, z = along(scale, self, axis), along(zero_point, self, axis)
    inside, in_s, in_z = slopes(self, s, z, quant_min, quant_max)
    total = torch.zeros_like(self) if self_t is None else self_t * inside
    for tangent, slope in ((scale_t, in_s), (zero_point_t, in_z)):
        if tangent is not None:
            total = total + grad_factor * slope * along(tangent, self, axis)
    return total.to(self.dtype)


# -- the rules --------------------------------------------------------------------------------------------------------

for _name in (
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
):
    rule(
        f"aten::{_name}",
        vjp={"self": fake_quantize_cachemask_backward.bind(grad="grad_output")},
        jvp={"output": fake_quantize_cachemask_backward.bind(grad="self_t")},
        improves="missing",
        defer_to_stock=always,  # only the tangent is missing
        source="ATen derivatives.yaml",
    )
for _name in ("per_tensor", "per_channel"):
    rule(
        f"aten::_fake_quantize_learnable_{_name}_affine",
        vjp={("self", "scale", "zero_point"): fake_quantize_learnable_backward},
        jvp={"result": fake_quantize_learnable_jvp},
        improves="missing",
        source="ATen _fake_quantize_learnable_per_tensor_affine_backward; the tangent is its adjoint",
    )
