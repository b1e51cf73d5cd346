"""Samples of extrema and medians."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


@samples_for("aten::aminmax")
def aminmax_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = spread((2, 3), dtype, device)
    yield Sample(x, dim=1)
    yield Sample(x.mT, dim=-1, keepdim=True)
    yield Sample(x)
    yield Sample(spread((), dtype, device), dim=0)
    yield Sample(spread((0, 2), dtype, device), dim=1)


@samples_for("aten::amax", "aten::amin")
def some_dims(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x, [1])
    yield Sample(x.mT, [0, -1], True)
    yield Sample(x)
    yield Sample(spread((), dtype, device), [-1])
    yield Sample(spread((0, 2), dtype, device), [1])


@samples_for("aten::max", "aten::min", "aten::median", "aten::nanmedian")
def all_dims(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    yield Sample(spread((2, 4), dtype, device))
    yield Sample(spread((3, 3), dtype, device).mT)
    yield Sample(spread((), dtype, device))
