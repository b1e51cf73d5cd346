"""Samples of products."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


@samples_for("aten::prod")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3), dtype, device)
    yield Sample(x)
    yield Sample(x.mT, dtype=torch.promote_types(dtype, torch.float64))
    yield Sample(torch.where(x == x.flatten()[2], 0, x))
    yield Sample(spread((), dtype, device))
    yield Sample(spread((0, 2), dtype, device))


@samples_for("aten::prod.dim_int")
def dim_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 5), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -2, True, dtype=torch.promote_types(dtype, torch.float64))
    yield Sample(torch.where(x == x[0, 2], 0, x), 0)
    yield Sample(spread((), dtype, device), -1)
    yield Sample(spread((2, 0), dtype, device), 1)
