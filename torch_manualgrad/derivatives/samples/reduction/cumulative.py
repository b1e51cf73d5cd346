"""Samples of cumulative products and of logcumsumexp."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


@samples_for("aten::cumprod")
def cumprod_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 5), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -2, dtype=torch.promote_types(dtype, torch.float64))
    yield Sample(torch.where((x == x[0, 1]) | (x == x[0, 3]), 0, x), 1)
    yield Sample(spread((), dtype, device), 0)
    yield Sample(spread((2, 0), dtype, device), -1)


@samples_for("aten::logcumsumexp")
def logcumsumexp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 5), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -1)
    yield Sample(spread((), dtype, device), 0)
    yield Sample(spread((2, 0), dtype, device), -1)
