"""Samples of cholesky, cholesky_inverse, cholesky_solve, linalg_cholesky_ex."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ...linalg.common import sym
from ..drawing import random, random_definite


def _definite_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (0, 2, 2), (2, 0, 0)):
        yield Sample(random_definite(*shape, dtype=dtype, device=device))


@samples_for("aten::linalg_cholesky_ex")
def cholesky_ex(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from _definite_samples(dtype, device)
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device), upper=True)


@samples_for("aten::cholesky")
def cholesky(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from _definite_samples(dtype, device)
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device), True)


def _factor(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A factor in either triangle, with a real diagonal."""
    X = random(*shape, dtype=dtype, seed=3)
    diagonal = X.diagonal(dim1=-2, dim2=-1)
    return (X + torch.diag_embed(1.5 + diagonal.abs() - diagonal)).to(device)


@samples_for("aten::cholesky_inverse")
def cholesky_inverse(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (2, 0, 0)):
        for upper in (False, True):
            yield Sample(_factor(*shape, dtype=dtype, device=device), upper)


@samples_for("aten::cholesky_solve")
def cholesky_solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    for upper in (False, True):
        yield Sample(right(3, 1), _factor(3, 3, dtype=dtype, device=device), upper)
        yield Sample(right(2, 3, 3), _factor(3, 3, dtype=dtype, device=device).mT, upper)
    yield Sample(right(2, 2), _factor(3, 1, 2, 2, dtype=dtype, device=device))
    yield Sample(right(0, 2), _factor(2, 0, 0, dtype=dtype, device=device))


def _hermitian(operator: str) -> Any:
    """A probe: the operator of the Hermitian part. Looked up when it runs: not every torch has each."""
    return lambda A, *args, **kwargs: getattr(torch.ops.aten, operator)(0.5 * sym(A), *args, **kwargs)


@probe_for("aten::cholesky_inverse")
def cholesky_inverse_probe(F: Tensor, upper: bool) -> Tensor:
    """The inverse, for a factor with a real diagonal."""
    if F.is_complex():
        F = F - 1j * torch.diag_embed(F.diagonal(dim1=-2, dim2=-1).imag)
    return torch.ops.aten.cholesky_inverse(F, upper)


probe_for("aten::linalg_cholesky_ex")(_hermitian("linalg_cholesky_ex"))
probe_for("aten::cholesky")(_hermitian("cholesky"))
