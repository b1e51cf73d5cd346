"""Samples of linalg_solve_triangular, triangular_solve."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random


def _triangular(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Both triangles well away from singular; each sample reads one."""
    X = random(*shape, dtype=dtype, seed=2)
    return (X + 2.0 * torch.diag_embed(X.diagonal(dim1=-2, dim2=-1).sgn())).to(device)


@samples_for("aten::linalg_solve_triangular")
def solve_triangular(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    A = _triangular(3, 3, dtype=dtype, device=device)
    for upper in (True, False):
        yield Sample(A, right(3, 2), upper=upper)
        yield Sample(A, right(1, 3), upper=upper, left=False, unitriangular=not upper)
    yield Sample(A, right(3, 1), upper=False, unitriangular=True)
    yield Sample(_triangular(2, 1, 3, 3, dtype=dtype, device=device), right(2, 3, 3), upper=True)
    yield Sample(A.mT, right(2, 3, 1), upper=False)
    yield Sample(_triangular(2, 0, 0, dtype=dtype, device=device), right(0, 2), upper=False)


@samples_for("aten::triangular_solve")
def triangular_solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    B = random(3, 2, dtype=dtype, device=device, seed=1)
    A = _triangular(3, 3, dtype=dtype, device=device)
    for upper in (True, False):
        for transpose in (True, False):
            yield Sample(B, A, upper, transpose, upper == transpose)
    yield Sample(B, _triangular(2, 3, 3, dtype=dtype, device=device))
    yield Sample(random(2, 3, 1, dtype=dtype, device=device), A, False, True)
