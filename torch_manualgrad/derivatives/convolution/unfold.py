"""Patches of an image as columns, and their sum: im2col and col2im, each the transpose of the other; grids of affine maps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, linear_in

from .common import random

_aten = torch.ops.aten
_WINDOWS = (([2, 2], [1, 1], [0, 0], [1, 1]), ([2, 1], [1, 2], [1, 0], [2, 1]))  # kernel, dilation, padding, stride


def _images(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for window in _WINDOWS:
        yield Sample(random(1, 2, 3, 4, dtype=dtype, device=device), *window)


def _columns(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for window in _WINDOWS:
        columns = _aten.im2col(random(1, 2, 3, 4, dtype=dtype, device=device), *window)
        yield Sample(columns.cos(), [3, 4], *window)


def _maps(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(random(2, 2, 3, dtype=dtype, device=device), [2, 1, 2, 3], False)
        yield Sample(random(1, 3, 4, dtype=dtype, device=device), [1, 2, 2, 3, 2], True)


linear_in(
    "aten::im2col",
    {
        "self": lambda grad, self_sizes, kernel_size, dilation, padding, stride: _aten.col2im(
            grad, self_sizes[-2:], kernel_size, dilation, padding, stride
        )
    },
    samples=_images,
)
linear_in(
    "aten::col2im",
    {
        "self": lambda grad, kernel_size, dilation, padding, stride: _aten.im2col(
            grad, kernel_size, dilation, padding, stride
        )
    },
    samples=_columns,
)
linear_in(
    "aten::affine_grid_generator",
    {"theta": lambda grad, size, align_corners: _aten.affine_grid_generator_backward(grad, size, align_corners)},
    samples=_maps,
)
