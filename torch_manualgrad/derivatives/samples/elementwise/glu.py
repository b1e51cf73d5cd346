"""Samples of glu and its backward operator."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


@samples_for("aten::glu")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(-2.3, 2.9, 24, dtype=dtype, device=device).reshape(2, 4, 3) * 0.7
    yield from (Sample(x, 1), Sample(x, 0), Sample(x[0, :, 0], -1))


@samples_for("aten::glu_backward")
def backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim in (s.args for s in samples(dtype, device)):
        yield Sample(x.chunk(2, dim)[1].cos(), x, dim)
