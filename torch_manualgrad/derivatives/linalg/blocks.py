"""The matrix that couples the cotangents of two triangular factors, for large matrices: by blocks of columns.

With full matrices, most of the arithmetic in $T = tril(L^H gL - triu(gU) U^H, -1)$ and $X = T U^-H$ (see lu.py) is on
zeros. Write $W$ for $triu(gU)$ with $X$ below the diagonal. Column $j$ of $X$ depends on the columns after it:

    $X_j conj(u_jj) = tril(L^H gL, -1)_j - sum_(c > j) W_c conj(u_jc)$,

so blocks of columns are computed from the last to the first, each with two products and a small triangular solve. In
the Cholesky factorization (see cholesky.py) $U$ is $L^H$, without a cotangent of its own, and $X$ has a diagonal:
$T = phi(L^H gL)$.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.limits import LIMITS


def serve(L: Tensor, columns: int) -> bool:
    """Whether blocks are faster: on the CPU, if $L$ has at least this number of columns."""
    return L.is_cpu and L.shape[-1] >= columns


def _block(k: int) -> int:
    """The number of columns in a block: about an eighth of $k$, within limits."""
    return min(max(k // 256 * 32, LIMITS["least_block"]), LIMITS["most_block"])


def coupled(
    grad_L: Tensor | None, grad_U: Tensor | None, L: Tensor, U: Tensor, *, with_diagonal: bool = False
) -> Tensor:
    """$W$ of the module's docstring.

    Args:
        grad_L: cotangent of $L$, (*, k, k). Entries below the diagonal are read, and the diagonal if $X$ has one. None
            for zero.
        grad_U: cotangent of $U$, (*, k, n), $n >= k$. The upper triangle is read. None for zero. At least one of
            ``grad_L`` and ``grad_U`` is given.
        L: (*, k, k).
        U: (*, k, n).
        with_diagonal: whether $X$ has a diagonal; grad_U is then None.

    Returns:
        (*, k, n).
    """
    k, n = U.shape[-2:]
    first = 0 if with_diagonal else -1
    W = U.new_zeros(U.shape) if grad_U is None else grad_U.triu()
    step = _block(k)
    for begin in range((k - 1) // step * step, -1, -step):
        end = min(begin + step, k)
        diagonal = U[..., begin:end, begin:end]
        Y = -W[..., begin:, end:] @ U[..., begin:end, end:].mH
        Y[..., : end - begin, :] -= W[..., begin:end, begin:end] @ diagonal.mH
        if grad_L is not None:
            Y += L[..., begin:, begin:].mH @ grad_L[..., begin:, begin:end].tril(first)
        if with_diagonal:
            Y.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        elif end == k:  # the last column of X is zero whatever the last pivot is
            diagonal = diagonal.clone()
            diagonal[..., -1, -1] = 1
        X = torch.linalg.solve_triangular(diagonal.mH, Y.tril_(first), upper=False, left=False)
        W[..., begin:, begin:end] += X
    return W
