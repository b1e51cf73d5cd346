"""Samples of _linalg_solve_ex."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random, random_conditioned


@samples_for("aten::_linalg_solve_ex")
def solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def matrices(*shape: int) -> Tensor:
        return random_conditioned(*shape, dtype=dtype, device=device)

    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    yield Sample(matrices(3, 3), right(3, 2))
    yield Sample(matrices(3, 3).mT, right(2, 3), left=False)
    yield Sample(matrices(3, 3), right(3))
    yield Sample(matrices(2, 3, 3), right(2, 3))
    yield Sample(matrices(1, 3, 3), right(2, 3, 1))
    yield Sample(matrices(2, 1, 2, 2), right(1, 3, 2, 2), left=False)
    yield Sample(matrices(2, 0, 0), right(1, 0, 2))


@probe_for("aten::_linalg_solve_ex")
def solve_probe(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """The solution alone: LU and pivots depend on A, but are not differentiable outputs."""
    return torch.ops.aten._linalg_solve_ex(A, B, left=left)[0]
