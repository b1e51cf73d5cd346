"""Samples of sparse_mask."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import times_identity


@samples_for("aten::sparse_mask")
def masks(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = random(2, 3, dtype=dtype, device=device)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=dtype, device=device)
    yield Sample(x, mask.to_sparse())


probe_for("aten::sparse_mask")(times_identity(torch.ops.aten.sparse_mask))
