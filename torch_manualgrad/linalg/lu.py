"""LU with and without pivoting."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.op.define import custom_op
from torch_manualgrad.derivatives.linalg.lu import linalg_lu_backward, linalg_lu_jvp, unpacked

from ..arguments import checked
from ..primal import linalg_lu
from .arguments import matrix


class LU(NamedTuple):
    """$P$ (*, m, m), $L$ (*, m, k), $U$ (*, k, n), with $A = P L U$; without pivoting, $P$ is (0,) and $A = L U$."""

    P: Tensor
    L: Tensor
    U: Tensor


@checked
def lu(A: Tensor, *, pivot: bool = True) -> LU:
    """LU factorization, like `torch.linalg.lu`, with a derivative also where the last pivot is zero.

    Args:
        A: (*, m, n), float32, float64, complex64 or complex128.
        pivot: False for the factorization without pivoting, $A = L U$, on any device; torch has it on CUDA only. It is
            unstable, except for matrices such as diagonally dominant or definite ones.

    Returns:
        `LU`: $P$, a permutation; $L$, lower triangular with ones on the diagonal; $U$, upper triangular. At least float32
        under autocast.

    Raises:
        ValueError: $A$ is not a matrix.
        TypeError: $A$ is neither floating point nor complex.
        NotImplementedError: half precision without autocast.

    Note:
        Where not differentiable: at a zero pivot before the last one, and at any zero pivot if $m > n$ and the loss depends
        on $L$. The gradient then has inf or nan. If $m <= n$, $L$ and $U$ are differentiable where the last pivot is zero.
        $P$ is a constant. Without pivoting, division by a zero pivot makes $L$ and $U$ themselves inf or nan.

    References:
        `torch.linalg.lu`; for small matrices, primal/lu.py; Golub and Van Loan, Matrix Computations, 3.2; for the
        derivative, derivatives/linalg/lu.py.
    """
    return LU(*_lu(matrix(A, "A"), pivot))


@custom_op("manualgrad::lu(Tensor A, bool pivot=True) -> (Tensor P, Tensor L, Tensor U)")
def _lu(A: Tensor, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    if pivot or A.is_cuda:
        return linalg_lu(A, pivot=pivot)
    packed = A.clone(memory_format=torch.contiguous_format)
    _eliminate(packed)
    L, U = unpacked(packed)
    torch.diagonal(L, dim1=-2, dim2=-1).fill_(1)
    return A.new_empty(0), L, U


_PANEL = 16  # up to this many columns are eliminated one by one; more are halved recursively, to use matrix products


def _eliminate(A: Tensor) -> None:
    """Overwrite $A$ with its factors without pivoting, packed."""
    m, n = A.shape[-2:]
    if n <= _PANEL:
        for j in range(min(m, n)):
            A[..., j + 1 :, j] /= A[..., j : j + 1, j]
            A[..., j + 1 :, j + 1 :] -= A[..., j + 1 :, j : j + 1] * A[..., j : j + 1, j + 1 :]
        return
    half = n // 2
    top = min(half, m)
    left, right = A[..., :half], A[..., half:]
    _eliminate(left)
    right[..., :top, :] = torch.linalg.solve_triangular(
        left[..., :top, :top], right[..., :top, :], upper=False, unitriangular=True
    )
    if m > half:
        rest = right[..., half:, :]
        rest -= left[..., half:, :] @ right[..., :half, :]
        _eliminate(rest)


@_lu.impl_fake
def _(A: Tensor, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    if pivot or A.is_cuda:
        return linalg_lu(A, pivot=pivot)
    k = min(A.shape[-2:])
    return A.new_empty(0), A.new_empty(*A.shape[:-1], k), A.new_empty(*A.shape[:-2], k, A.shape[-1])


@_lu.impl_vmap
def _(info: Any, in_dims: Any, A: Tensor, pivot: bool = True) -> Any:
    return _lu(A.movedim(in_dims.A, 0), pivot), (0 if pivot else None, 0, 0)


@_lu.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return *output, inputs.pivot


def _gradient(ctx: Any, saved: Any, _: None, grad_L: Tensor | None, grad_U: Tensor | None) -> dict[str, Tensor]:
    return {"A": linalg_lu_backward(grad_L, grad_U, *saved)}


_lu.impl_backward(_gradient, output_differentiability=(False, True, True))


@_lu.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    return None, *linalg_lu_jvp(tangents.A, *output, inputs.pivot)
