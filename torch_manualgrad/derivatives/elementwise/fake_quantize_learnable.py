"""Fake quantization with a scale and a zero point that are learned: y = s (q - z), with q = round(x / s + z) clamped.

The straight-through estimate takes what is added by rounding, d = q - (x / s + z), for a constant. So y = x + s d where q is
inside of its range, and y = s (q - z) where it is a bound; this function is what is differentiated, in every mode and order.
Both derivatives in s and z, and no others, are multiplied with ``grad_factor``, in forward mode, too.

References:
    Esser et al., Learned step size quantization, arXiv:1902.08153, equations 3 and 5; ATen
    _fake_quantize_learnable_per_tensor_affine_backward, which is for float32, and has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, formula, operator, rule


def _slopes(
    self: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives in x, s and z: where q is inside, a choice; d there, else the bound less z; 0 there, else -s."""
    x, s = self.detach(), scale.detach()
    z = zero_point.detach().round().clamp(quant_min, quant_max)
    q = (x * (1 / s) + z).round()
    inside = (q >= quant_min) & (q <= quant_max)
    bound = q.clamp(quant_min, quant_max) - (z + (zero_point - zero_point.detach()))
    return inside, torch.where(inside, q - z - x / s, bound), torch.where(inside, 0, -scale)


def _along(parameter: Tensor, self: Tensor, axis: int | None) -> Tensor:
    """One number for all of x, or for each of its indices along the axis."""
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
    """Cotangents of x, s and z, given that of s (q - z), by the straight-through estimate.

    Args:
        grad: cotangent of the result.
        self: x, real.
        scale: s, one number, or one for each index of x along the axis.
        zero_point: z, the shape of ``scale``; it is rounded, and clamped to the range.
        quant_min, quant_max: the range of q.
        grad_factor: for the derivatives in s and z.
        axis: None for one number.

    Returns:
        The shapes of ``self``, ``scale`` and ``zero_point``.

    References:
        ATen _fake_quantize_learnable_per_tensor_affine_backward.
    """
    s, z = _along(scale, self, axis), _along(zero_point, self, axis)
    inside, in_s, in_z = _slopes(self, s, z, quant_min, quant_max)
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
    """Tangent of s (q - z), by the straight-through estimate: the adjoint of `fake_quantize_learnable_backward`.

    Args:
        self_t, scale_t, zero_point_t: tangents; None for zero.
        self: x, real.
        scale: s, one number, or one for each index of x along the axis.
        zero_point: z, the shape of ``scale``; it is rounded, and clamped to the range.
        quant_min, quant_max: the range of q.
        grad_factor: for the derivatives in s and z.
        axis: None for one number.

    Returns:
        The shape of ``self``.

    References:
        The same as for `fake_quantize_learnable_backward`.
    """
    s, z = _along(scale, self, axis), _along(zero_point, self, axis)
    inside, in_s, in_z = _slopes(self, s, z, quant_min, quant_max)
    total = torch.zeros_like(self) if self_t is None else self_t * inside
    for tangent, slope in ((scale_t, in_s), (zero_point_t, in_z)):
        if tangent is not None:
            total = total + grad_factor * slope * _along(tangent, self, axis)
    return total.to(self.dtype)


# -- the rules --------------------------------------------------------------------------------------------------------


def _straight_through(name: str, axes: Sequence[int]) -> Callable[..., Tensor]:
    """What has the estimate for its derivative where rounding adds nothing, as in the samples: x, or s (q - z)."""

    def probe(self: Tensor, scale: Tensor, zero_point: Tensor, *others: Any) -> Tensor:
        narrow = [p.float() if axes else p for p in (scale, zero_point)]  # of channels they are float32 in any case
        found: Tensor = operator(name)(self, *narrow, *others)
        with torch.no_grad():
            s, z = (_along(p, self, axes[0] if axes else None) for p in (scale, zero_point))
            low, high = others[len(axes) : len(axes) + 2]
            bound = torch.where(self > 0, high, low)
            value = torch.where(_slopes(self, s, z, low, high)[0], self, s * (bound - z))
        return found + (value - found).detach()

    return probe


def _samples(*axes: int) -> Callable[[torch.dtype, torch.device | str], Iterable[Sample]]:
    """Multiples of the scale, inside and outside of the range; scales of channels are float32, and constant."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        of_scale = torch.float32 if axes else dtype
        scale = torch.tensor([0.25, 0.5, 0.125], dtype=of_scale, device=device)
        zero_point = torch.tensor([1.0, -2.0, 0.0], dtype=of_scale, device=device)
        steps = torch.tensor([[-30.0, 2.0, -3.0], [4.0, 25.0, 1.0]], dtype=dtype, device=device)
        if axes:
            yield Sample((steps * scale.to(dtype)).requires_grad_(), scale, zero_point, *axes, -8, 7)
        else:
            yield Sample(steps * scale[0], scale[:1], zero_point[:1], -8, 7)

    return samples


for _name, _axes in (("per_tensor", ()), ("per_channel", (1,))):
    _name = f"aten::_fake_quantize_learnable_{_name}_affine"
    rule(
        _name,
        vjp={("self", "scale", "zero_point"): fake_quantize_learnable_backward},
        jvp={"result": fake_quantize_learnable_jvp},
        improves="missing",
        source="ATen _fake_quantize_learnable_per_tensor_affine_backward; the tangent is its adjoint",
        samples=_samples(*_axes),
        probe=_straight_through(_name, _axes),
    )
