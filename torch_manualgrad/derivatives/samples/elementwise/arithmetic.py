"""Samples of ldexp."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import (
    Sample,
    samples_for,
)


@samples_for("aten::ldexp.Tensor")
def ldexp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.tensor([0.45, -1.7, 0.6]).to(device, dtype)
    if not dtype.is_complex:
        yield Sample(x, torch.tensor([[-1.5], [0.4]]).to(device, dtype))
    yield Sample(x, torch.tensor([-2, 3, 1], dtype=torch.int32, device=device))
