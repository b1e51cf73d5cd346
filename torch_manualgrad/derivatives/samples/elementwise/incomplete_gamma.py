"""Samples of the incomplete gamma functions and of the gamma distribution."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


@samples_for("aten::igamma", "aten::igammac")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        x = torch.tensor([[0.7, 1.3, 2.5], [0.4, 3.1, 14.0]], dtype=dtype, device=device)
        yield Sample(x.flip(0) + 0.4, x)
        yield Sample(torch.tensor([[2.2], [12.5]], dtype=dtype, device=device), x[1])
        yield Sample(torch.tensor(3, device=device), x[1, 1])


@samples_for("aten::_standard_gamma")
def certain_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Of which nothing is random: for a shape as large as this the sample is the shape, rounded."""
    if not dtype.is_complex:
        yield Sample(torch.tensor([[1e34, 3e34], [2e35, 1e35]], dtype=dtype, device=device))
