"""Eigenvalues and eigenvectors of small Hermitian matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.libraries import kernel_limit
from ..core.limits import LIMITS
from ..core.rule import formula, primal_for
from ..derivatives.linalg.eigh import eigh_rule, linalg_eigh_backward
from .common import bind, finite, serves
from .threads import on_threads

# Upper limits: the smaller dimension of a real and of a complex matrix, and the larger dimension. Up to these a single
# matrix takes no longer than with LAPACK.
_JACOBI = (LIMITS["eigh_real"], LIMITS["eigh_complex"], LIMITS["eigh_real"])  # the kernel itself takes up to 16


def _tridiagonal() -> tuple[int, int, int]:
    """The same limits for matrices whose eigenvectors are computed."""
    largest = kernel_limit("tridiagonal_order")
    return largest, 0, largest


@formula(kernel=("cpu", "cuda"))
def eigh_jacobi(A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a Hermitian matrix by cyclic Jacobi rotations.

    Args:
        A: (*, n, n) with $n <= 16$; float32, float64, complex64 or complex128.
        lower: which triangle is read.

    Returns:
        Eigenvalues (*, n), ascending, and eigenvectors (*, n, n) in columns.

    Raises:
        RuntimeError: another size or dtype, or not square.

    Note:
        Where not differentiable: as `linalg_eigh_backward`.

    References:
        Golub and Van Loan, Matrix Computations, 8.5.
    """
    L, V = torch.linalg.eigh(A, UPLO="L" if lower else "U")
    return L, V.contiguous()


@formula(kernel=("cpu",))
def eigh_tridiagonal(A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix by Householder's reduction to a tridiagonal one, and implicit QL.

    Args:
        A: (*, n, n) with $n <= 128$; float32 or float64.
        lower: which triangle is read.

    Returns:
        Eigenvalues (*, n), ascending, and eigenvectors (*, n, n) in columns.

    Raises:
        RuntimeError: another size or dtype, or not square.

    Note:
        Where not differentiable: as `linalg_eigh_backward`.

    References:
        Golub and Van Loan, Matrix Computations, 8.3.
    """
    return eigh_jacobi.reference(A, lower)


@formula(kernel=("default",))
def eigh_small(A: Tensor, lower: bool = True, vectors: bool = True) -> tuple[Tensor, Tensor]:
    """`eigh_jacobi`, or for larger matrices `eigh_tridiagonal`; if $A$ holds inf or nan, LAPACK's error or result.

    Args:
        A: as in these.
        lower: as in these.
        vectors: whether to compute eigenvectors: LAPACK's error depends on it.

    Returns:
        Eigenvalues (*, n) and eigenvectors (*, n, n), which are undefined if not ``vectors``.

    Raises:
        torch.linalg.LinAlgError: as `torch.linalg.eigh`, or `torch.linalg.eigvalsh`.

    Note:
        Where not differentiable: as `linalg_eigh_backward`.

    References:
        `eigh_jacobi`; `eigh_tridiagonal`; ATen _linalg_eigh.
    """
    return eigh_jacobi.reference(A, lower)


@eigh_small.impl("default")
def _(A: Tensor, lower: bool = True, vectors: bool = True) -> tuple[Tensor, Tensor]:
    L, V = (eigh_jacobi if serves(A, _JACOBI) else eigh_tridiagonal)(A, lower)
    if finite(L):
        return L, V
    L, found = torch.ops.aten._linalg_eigh(A, "L" if lower else "U", vectors)
    return L, (found.contiguous() if vectors else V)


bind(eigh_jacobi, linalg_eigh_backward, (True, True))
bind(eigh_tridiagonal, linalg_eigh_backward, (True, True))
bind(eigh_small, linalg_eigh_backward, (True, True))


@primal_for(eigh_rule)
def linalg_eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """aten::_linalg_eigh."""
    square = UPLO.upper() in ("L", "U") and A.shape[-2:-1] == A.shape[-1:]
    if square and (serves(A, _JACOBI) or compute_v and serves(A, _tridiagonal())):
        L, V = eigh_small(A, UPLO.upper() == "L", compute_v)
        return L, (V if compute_v else A.new_empty(0))
    L, V = on_threads(torch.ops.aten._linalg_eigh, ("eigenvalues", "eigenvectors"), compute_v, A, UPLO, compute_v)
    return L, V
