"""Samples of im2col, col2im and affine grids."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random

_aten = torch.ops.aten

_WINDOWS = (([2, 2], [1, 1], [0, 0], [1, 1]), ([2, 1], [1, 2], [1, 0], [2, 1]))  # kernel, dilation, padding, stride


@samples_for("aten::im2col")
def images(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for window in _WINDOWS:
        yield Sample(random(1, 2, 3, 4, dtype=dtype, device=device), *window)


@samples_for("aten::col2im")
def columns(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for window in _WINDOWS:
        columns = _aten.im2col(random(1, 2, 3, 4, dtype=dtype, device=device), *window)
        yield Sample(columns.cos(), [3, 4], *window)


@samples_for("aten::affine_grid_generator")
def maps(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(random(2, 2, 3, dtype=dtype, device=device), [2, 1, 2, 3], False)
        yield Sample(random(1, 3, 4, dtype=dtype, device=device), [1, 2, 2, 3, 2], True)
