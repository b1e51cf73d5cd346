"""The replacement primals as operators, and comparisons of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
REAL = [torch.float32, torch.float64]


def svd_jacobi(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.manualgrad.svd_jacobi.default(A)


def eigh_jacobi(A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]:
    return torch.ops.manualgrad.eigh_jacobi.default(A, lower)


def eigh_tridiagonal(A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]:
    return torch.ops.manualgrad.eigh_tridiagonal.default(A, lower)


def lu_small(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.manualgrad.lu_small.default(A)


def gaussian_elimination(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.manualgrad.gaussian_elimination.default(A, B)


def solve_eliminated(LU: Tensor, pivots: Tensor, B: Tensor, adjoint: bool) -> Tensor:
    return torch.ops.manualgrad.solve_eliminated.default(LU, pivots, B, adjoint)


def cholesky_factor(A: Tensor, upper: bool = False) -> tuple[Tensor, Tensor]:
    return torch.ops.manualgrad.cholesky_factor.default(A, upper)


def outcomes(calls: list[Callable[[], Any]]) -> list[Any]:
    """What calls on a batch return: where the first result is finite, its matrices from the eighth on, and the other
    results; or the text of the error, as numbers."""
    found: list[Any] = []
    for call in calls:
        try:
            first, *others = [x] if isinstance(x := call(), Tensor) else x
        except torch.linalg.LinAlgError as error:
            found.append(torch.tensor([*str(error).encode()]))
        else:
            found += [first.isfinite(), first[8:], *others]
    return found


def hermitian(X: Tensor) -> Tensor:
    return (X + X.mH) / 2


def same_bits(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    def bits(x: Tensor) -> Tensor:
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int64)

    return all(torch.equal(bits(x), bits(y)) for x, y in zip(left, right, strict=True))
