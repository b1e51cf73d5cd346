"""Samples of linalg_lu_solve."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random, random_conditioned


@samples_for("aten::linalg_lu_solve")
def lu_solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    LU, pivots = torch.linalg.lu_factor(random_conditioned(3, 3, dtype=dtype, device=device))
    for left in (True, False):
        for adjoint in (False, True):
            for r in (1, 3):
                B = random(*((3, r) if left else (r, 3)), dtype=dtype, device=device, seed=r)
                yield Sample(LU, pivots, B, left=left, adjoint=adjoint)
    yield Sample(LU, pivots, random(2, 3, 2, dtype=dtype, device=device))
    LU, pivots = torch.linalg.lu_factor(random_conditioned(2, 3, 3, dtype=dtype, device=device))
    yield Sample(LU, pivots, random(3, 1, dtype=dtype, device=device), adjoint=True)
