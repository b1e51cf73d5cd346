"""Samples of upsampling."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, Sampler, probe_for, samples_for

from ..drawing import random
from ..probes import as_function

_SIZES = ((3,), (3, 2), (2, 3, 2))  # of the input, in one to three dims
_LARGER = ((5,), (4, 3), (3, 4, 3))
_SMALLER = ((2,), (2, 3), (3, 2, 1))


def _samples(dims: int, corners: bool) -> Sampler:
    """To a larger size and a smaller one, by sizes and by scales."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *_SIZES[dims - 1], dtype=dtype, device=device)
        yield Sample(x, list(_LARGER[dims - 1]), *[True] * corners, *[None] * dims)
        yield Sample(x, list(_SMALLER[dims - 1]), *[False] * corners, *[None] * dims)
        scaled = [int(1.7 * n) for n in _SIZES[dims - 1]]
        yield Sample(x, scaled, *[False] * corners, *[1.7] * dims)

    return samples


def _backward_samples(dims: int, corners: bool) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _samples(dims, corners)(dtype, device):
            x, size, *rest = sample.args
            g = random(*x.shape[:2], *size, dtype=dtype, device=device)
            yield Sample(g, size, list(x.shape), *rest)

    return samples


def _register(name: str, dims: int, corners: bool) -> None:
    samples_for(f"aten::{name}")(_samples(dims, corners))
    samples_for(f"aten::{name}_backward")(_backward_samples(dims, corners))


for _dims in (1, 2, 3):
    _register(f"upsample_nearest{_dims}d", _dims, False)
    _register(f"_upsample_nearest_exact{_dims}d", _dims, False)
for _dims, _name in enumerate(("linear1d", "bilinear2d", "trilinear3d"), 1):
    _register(f"upsample_{_name}", _dims, True)
for _name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"):
    _register(_name, 2, True)
for _name in ("upsample_linear1d", "upsample_trilinear3d", "_upsample_bicubic2d_aa"):
    probe_for(f"aten::{_name}")(as_function(getattr(torch.ops.aten, _name)))
