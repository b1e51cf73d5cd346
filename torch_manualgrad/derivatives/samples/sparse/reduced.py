"""Samples of _sparse_mm_reduce_impl."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random


@samples_for("aten::_sparse_mm_reduce_impl")
def reduced(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Of the dense factor: finite differences cannot move a sparse one."""
    pattern = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]], device=device)
    A = (random(3, 3, dtype=dtype, device=device) * pattern).to_sparse_csr()
    for reduce in () if dtype.is_complex else ("sum", "mean", "amax", "amin"):
        yield Sample(A, random(3, 2, dtype=dtype, device=device, seed=1), reduce)


probe_for("aten::_sparse_mm_reduce_impl")(lambda *args: torch.ops.aten._sparse_mm_reduce_impl(*args)[0])
