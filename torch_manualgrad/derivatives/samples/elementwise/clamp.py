"""Samples of clamp with tensors as bounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import (
    Sample,
    samples_for,
)


@samples_for("aten::clamp.Tensor")
def clamp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.tensor([[-2.1, -0.7, 0.2, 0.9], [2.3, 0.4, -1.4, 1.6]], dtype=dtype, device=device)
    low = torch.tensor([-1.0, -0.5, 0.5, 0.1], dtype=dtype, device=device)
    high = torch.tensor([[0.6], [0.8]], dtype=dtype, device=device)
    yield from (Sample(x, low, high), Sample(x, low), Sample(x, None, high), Sample(x, high + 0.1, low[:1]))
