"""Parts of matrices, and the limits of kernels, for all families of linear algebra."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.libraries import kernel_limit

# The largest order that the kernels for derivatives of small matrices take; 0 where there are no kernels.
LARGEST = kernel_limit("lane_order")
_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def small(A: Tensor, order: int, in_cache: int = 0) -> bool:
    """Whether a kernel takes matrices whose larger dimension is ``order``.

    Args:
        A: one of the matrices, or the triangle of one.
        order: the larger dimension.
        in_cache: the order up to which the CPU kernel for single real square matrices is faster than BLAS.
    """
    if A.dtype not in _DTYPES:
        return False
    return order <= LARGEST or (
        order <= in_cache and A.is_cpu and not A.is_complex() and order == A.shape[-1] == A.shape[-2]
    )


def summed_to(gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """A gradient, summed to the shape of the input that was broadcast."""
    return gradient if gradient.shape == sizes else gradient.sum_to_size(sizes)


def sym(X: Tensor) -> Tensor:
    """$X + X^H$."""
    return X + X.mH


def skew(X: Tensor) -> Tensor:
    """$X - X^H$."""
    return X - X.mH


def phi(X: Tensor) -> Tensor:
    """The lower triangle with half of the diagonal: $phi(X) + phi(X)^H = X$ for a Hermitian $X$ with a real diagonal."""
    lower = X.tril()
    return lower - 0.5 * torch.diag_embed(X.diagonal(dim1=-2, dim2=-1))


def leading(X: Tensor, *, rows: int | None = None, columns: int | None = None) -> Tensor:
    """The first rows and columns. Not ``X[..., :columns]``: with all columns, this is an alias, for which PyTorch's vmap of
    batched gradients raises."""
    X = X if rows is None else X.narrow(-2, 0, rows)
    return X if columns is None else X.narrow(-1, 0, columns)


def magnitude(A: Tensor) -> Tensor:
    """The largest modulus in each matrix, (*, 1, 1), or 1 where that is zero: a constant to every derivative."""
    if A.numel() == 0:
        return torch.ones((), dtype=A.dtype, device=A.device).abs()
    largest = A.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)


def of_finite(function: Callable[[Tensor], Tensor], A: Tensor) -> Tensor:
    """``function(A)`` of matrices with a decomposition that raises unless all entries are finite. Other matrices give nan."""
    finite = A.detach().isfinite().all(-1).all(-1)[..., None, None]
    found = function(torch.where(finite, A, 0))
    unknown = torch.where(finite, 0, A) * math.nan  # a tensor of nan would have derivatives of zero
    return torch.where(finite, found, unknown if found.shape == A.shape else unknown.mT)


def eye_like(X: Tensor) -> Tensor:
    """The identity matrix of the order of $X$, in its dtype and on its device."""
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def pivots_fit(LU: Tensor, pivots: Tensor) -> str:
    """For the ``requires`` of a formula: an error if pivots do not fit, else "". LAPACK uses pivots as places in memory."""
    n = LU.shape[-2] if LU.dim() > 1 else 0
    if pivots.numel() and not 1 <= int(pivots.min()) <= int(pivots.max()) <= n:
        return f"pivots: expected numbers from 1 to {n}, got {int(pivots.min())} to {int(pivots.max())}"
    return ""
