"""Samples of linalg_matrix_exp."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random


@samples_for("aten::linalg_matrix_exp")
def matrix_exp(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield Sample(random(3, 3, dtype=dtype, device=device))
    yield Sample(2 * random(2, 2, 2, dtype=dtype, device=device).mT)
    small_and_large = torch.tensor([0.02, 2.0], dtype=dtype, device=device)[:, None, None]
    yield Sample(small_and_large * random(2, 6, 6, dtype=dtype, device=device))
    yield Sample(random(1, 1, dtype=dtype, device=device))
    yield Sample(random(2, 0, 0, dtype=dtype, device=device))
    yield Sample(torch.zeros(2, 2, dtype=dtype, device=device))
