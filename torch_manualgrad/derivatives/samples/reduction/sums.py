"""Samples of sums and means."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64)


@samples_for("aten::sum", "aten::mean")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3), dtype, device)
    yield Sample(x)
    yield Sample(x.mT, dtype=_wider(dtype))
    yield Sample(spread((), dtype, device))
    yield Sample(spread((0, 2), dtype, device))


@samples_for("aten::sum.dim_IntList", "aten::mean.dim")
def dim_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x, [1])
    yield Sample(x.mT, [0, -1], True)
    yield Sample(x, [], dtype=_wider(dtype))
    yield Sample(x, None)
    yield Sample(spread((), dtype, device), [-1])
    yield Sample(spread((2, 0), dtype, device), [1])


@samples_for("aten::nansum")
def nansum_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    for sample in dim_samples(dtype, device):
        if sample.args[1] != []:  # PyTorch's fake kernel takes it for no dims
            yield sample
    x = spread((2, 3), dtype, device)
    yield Sample(torch.where(x > 1, torch.nan, x), [0], dtype=_wider(dtype))


@samples_for("aten::cumsum")
def cumsum_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -2, dtype=_wider(dtype))
    yield Sample(spread((), dtype, device), 0)
    yield Sample(spread((2, 0), dtype, device), -1)


@samples_for("aten::trace")
def trace_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for m, n in ((2, 3), (3, 3), (0, 2)):
        yield Sample(spread((m, n), dtype, device))
