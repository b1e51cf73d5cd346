"""Samples of segment_reduce."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


@samples_for("aten::segment_reduce")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(0.3, 2.9, 10, dtype=dtype, device=device).reshape(5, 2).sin() + 0.2
    lengths = torch.tensor([2, 0, 3], device=device)
    offsets = torch.tensor([[0, 2, 3], [0, 1, 3]], device=device)
    yield Sample(x, "sum", lengths=lengths)
    yield Sample(x, "mean", lengths=lengths[::2])
    yield Sample(x, "max", lengths=lengths[::2])
    yield Sample(x[:3].mT.contiguous(), "min", offsets=offsets, axis=1, initial=9)
    yield Sample(x, "prod", lengths=lengths, initial=2)
