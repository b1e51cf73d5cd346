"""Samples of choices by a mask."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, samples_for


def _points(dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Numbers, and a mask."""
    x = torch.linspace(-2.3, 2.9, 6, dtype=torch.float64, device=device).reshape(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, True]], device=device)
    return torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype), mask


@samples_for("aten::where.self")
def where_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, mask = _points(dtype, device)
    yield from (Sample(mask, x, x.flip(0)), Sample(mask[:, :1], x[0], x[1, 1]), Sample(mask[0, 0], x[0, 0], x[1, 1]))


@samples_for("aten::fill.Tensor")
def fill_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, _ = _points(dtype, device)
    yield from (Sample(x, x[1, 1]), Sample(x[0, 0], x[1, 1]), Sample(x[:0], x[1, 1]))


def _masked(x: Tensor, mask: Tensor, value: Tensor | float) -> Iterable[Sample]:
    for self, places in ((x, mask), (x, mask[0]), (x[0], mask), (x[0, 0], mask[0, 0])):
        yield Sample(self, places, value)


@samples_for("aten::masked_fill.Tensor")
def masked_fill(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, mask = _points(dtype, device)
    return _masked(x, mask, x[1, 1])


@samples_for("aten::masked_fill.Scalar")
def masked_fill_number(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    return _masked(*_points(dtype, device), 2.5)
