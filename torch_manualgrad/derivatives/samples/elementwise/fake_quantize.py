"""Samples and probes of fake quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, operator, probe_for, samples_for

from ...elementwise.fake_quantize import along, slopes


def _straight_through(name: str) -> Callable[..., Tensor]:
    """A probe whose derivative is the estimate: x in the range, and 0 outside."""

    def probe(self: Tensor, *others: Any) -> Tensor:
        # a scale is always float32
        plain = [o.detach().float() if isinstance(o, Tensor) and o.is_floating_point() else o for o in others]
        found, mask = operator(name)(self, *plain)
        return found + (self * mask - found).detach()

    return probe


def _constant_scale(*others: Any) -> Sampler:
    """Numbers inside and outside of the range, clear of its ends; tensors among the others are constant."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            x = torch.tensor([[-2.03, -0.71, 0.22], [0.93, 0.44, 3.07]], dtype=dtype, device=device).requires_grad_()
            yield Sample(x, *[o.to(device) if isinstance(o, Tensor) else o for o in others])

    return samples


_RANGE = (-8, 7)
_SCALES, _ZEROS = torch.tensor([0.25, 0.5, 0.3]), torch.tensor([0, 1, 0], dtype=torch.int32)

for _name, _others in (
    ("fake_quantize_per_tensor_affine_cachemask", (0.25, 1, *_RANGE)),
    ("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", (_SCALES[:1], _ZEROS[1:2], _ZEROS[1:2], *_RANGE)),
    ("fake_quantize_per_channel_affine_cachemask", (_SCALES, _ZEROS, 1, *_RANGE)),
):
    samples_for(f"aten::{_name}")(_constant_scale(*_others))
    probe_for(f"aten::{_name}")(_straight_through(f"aten::{_name}"))


def _straight_through_learned(name: str, axes: Sequence[int]) -> Callable[..., Tensor]:
    """A probe whose derivative is the estimate where rounding adds nothing, as in the samples: x, or s (q - z)."""

    def probe(self: Tensor, scale: Tensor, zero_point: Tensor, *others: Any) -> Tensor:
        narrow = [p.float() if axes else p for p in (scale, zero_point)]  # those of channels are always float32
        found: Tensor = operator(name)(self, *narrow, *others)
        with torch.no_grad():
            s, z = (along(p, self, axes[0] if axes else None) for p in (scale, zero_point))
            low, high = others[len(axes) : len(axes) + 2]
            bound = torch.where(self > 0, high, low)
            value = torch.where(slopes(self, s, z, low, high)[0], self, s * (bound - z))
        return found + (value - found).detach()

    return probe


def _learned_scale(*axes: int) -> Sampler:
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


for _name, _axes in (
    ("aten::_fake_quantize_learnable_per_tensor_affine", ()),
    ("aten::_fake_quantize_learnable_per_channel_affine", (1,)),
):
    samples_for(_name)(_learned_scale(*_axes))
    probe_for(_name)(_straight_through_learned(_name, _axes))
