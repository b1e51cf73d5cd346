"""Samples of renorm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


@samples_for("aten::renorm")
def renorm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((3, 4, 2), dtype, device) * torch.tensor([0.05, 1, 2], device=device).reshape(3, 1, 1).to(dtype)
    for p in (2.0, 3.0, 1.0, 0.5, 1.5, math.inf):
        yield Sample(x, p, 0, 1.0)
    yield Sample(x, 2.5, -1, 0.7)
    yield Sample(x, 2.0, 1, 100.0)
