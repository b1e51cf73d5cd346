"""Forwards of our own for small matrices: what ``override(forward=True)`` and ``mg.linalg`` compute in place of LAPACK.

LAPACK takes one matrix at a time, and below some size spends its time on everything but arithmetic. The operators here
take as many matrices at once as a vector of the processor has places: csrc/math/jacobi.h and elimination.h. They are
as exact as LAPACK, small singular values of graded matrices more so. The singular values and vectors of a matrix are
the same to the bit wherever it stands in a batch. Where they differ from LAPACK's:

- Signs and phases: of each right singular vector, and of each eigenvector, the first entry of at least 0.37 of the
  modulus of the largest is real and positive. Away from degeneracy the vectors are smooth functions of A, but for a sign
  or phase where an entry passes this limit.
- A matrix with an inf or a nan gives nan for all of its results, and raises nothing. So `svd_small`, `eigh_small` and
  `lu_finite`, which are what is called, have LAPACK decide there: it raises, or gives nan elsewhere.
- Results are contiguous, by rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.formula import Formula, formula

# The largest smaller side of a real and of a complex matrix, and the largest side: up to there, by measurement, a single
# matrix takes no longer than by LAPACK. The kernels themselves take up to 16 and 32, the LU up to 8.
_SVD = (16, 8, 32)
_EIGH = (12, 8, 12)
_LU = (8, 8, 8)
_DEVICES = frozenset({"cpu"})
_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def _serves(A: Tensor, sizes: tuple[int, int, int]) -> bool:
    """Whether a matrix is decomposed here. Neither its values nor its batch count."""
    if A.dim() < 2 or A.dtype not in _DTYPES or A.device.type not in _DEVICES:
        return False
    real, complex_, largest = sizes
    return max(A.shape[-2:]) <= largest and min(A.shape[-2:]) <= (complex_ if A.is_complex() else real)


@formula(kernel=("cpu", "cuda"))
def svd_jacobi(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin singular value decomposition by one-sided Jacobi rotations.

    Args:
        A: (*, m, n) with min(m, n) <= 16 and max(m, n) <= 32; float32, float64, complex64 or complex128.
    Returns:
        U (*, m, k), S (*, k), descending, and Vh (*, k, n) with k = min(m, n). The singular vectors of zero singular
        values are orthonormal too.
    Raises: RuntimeError: another size or dtype.
    Source: Drmac and Veselic, New fast and accurate Jacobi SVD algorithm I (2008).
    """
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    return U.contiguous(), S, Vh.contiguous()


@formula(kernel=("cpu", "cuda"))
def eigh_jacobi(A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a Hermitian matrix by cyclic Jacobi rotations.

    Args:
        A: (*, n, n) with n <= 16; float32, float64, complex64 or complex128.
        lower: which triangle is read.
    Returns:
        Eigenvalues (*, n), ascending, and eigenvectors (*, n, n) in columns.
    Raises: RuntimeError: another size or dtype, or not square.
    Source: Golub and Van Loan, Matrix Computations, 8.5.
    """
    L, V = torch.linalg.eigh(A, UPLO="L" if lower else "U")
    return L, V.contiguous()


@formula(kernel=("cpu", "cuda"))
def lu_small(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LU factorisation, A = P L U, with partial pivoting by LAPACK's choice: the first of the largest.

    Args:
        A: (*, m, n) with m, n <= 8; float32, float64, complex64 or complex128.
    Returns:
        P (*, m, m), L (*, m, k), U (*, k, n) with k = min(m, n).
    Raises: RuntimeError: another size or dtype.
    Source: Golub and Van Loan, Matrix Computations, 3.4.
    """
    P, L, U = torch.linalg.lu(A)
    return P.contiguous(), L.contiguous(), U.contiguous()


# --- as LAPACK where not everything is finite: operators, as only a kernel may look at values -------------------------


@formula(kernel=("default",))
def svd_small(A: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """`svd_jacobi`, and where A holds inf or nan, LAPACK's error or result.

    Args:
        A: as `svd_jacobi`.
        vectors: whether U and Vh are asked for: LAPACK's error depends on it.
    Returns:
        U, S and Vh; U and Vh without meaning if not ``vectors``.
    Raises: torch.linalg.LinAlgError: as `torch.linalg.svd`, or `torch.linalg.svdvals`.
    Source: `svd_jacobi`; ATen _linalg_svd.
    """
    return svd_jacobi.reference(A)


@svd_small.impl("default")
def _(A: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    U, S, Vh = svd_jacobi(A)
    if _finite(S):
        return U, S, Vh
    left, S, right = torch.ops.aten._linalg_svd(A, False, vectors)
    return (left.contiguous(), S, right.contiguous()) if vectors else (U, S, Vh)


@formula(kernel=("default",))
def eigh_small(A: Tensor, lower: bool = True, vectors: bool = True) -> tuple[Tensor, Tensor]:
    """`eigh_jacobi`, and where A holds inf or nan, LAPACK's error or result.

    Args:
        A, lower: as `eigh_jacobi`.
        vectors: whether eigenvectors are asked for: LAPACK's error depends on it.
    Returns:
        Eigenvalues and eigenvectors, these without meaning if not ``vectors``.
    Raises: torch.linalg.LinAlgError: as `torch.linalg.eigh`, or `torch.linalg.eigvalsh`.
    Source: `eigh_jacobi`; ATen _linalg_eigh.
    """
    return eigh_jacobi.reference(A, lower)


@eigh_small.impl("default")
def _(A: Tensor, lower: bool = True, vectors: bool = True) -> tuple[Tensor, Tensor]:
    L, V = eigh_jacobi(A, lower)
    if _finite(L):
        return L, V
    L, found = torch.ops.aten._linalg_eigh(A, "L" if lower else "U", vectors)
    return L, (found.contiguous() if vectors else V)


@formula(kernel=("default",))
def lu_finite(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`lu_small`, and where a factor holds inf or nan, LAPACK's result, which then has nan in other places.

    Args: A: as `lu_small`. Returns: P, L and U.
    Source: `lu_small`; ATen linalg_lu.
    """
    return lu_small.reference(A)


@lu_finite.impl("default")
def _(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    P, L, U = lu_small(A)
    if not (_finite(L) and _finite(U)):
        P, L, U = (x.contiguous() for x in torch.ops.aten.linalg_lu(A))
    return P, L, U


def _finite(result: Tensor) -> bool:
    """Whether there is no inf and no nan. A sum that overflows costs time only."""
    return bool(result.sum().isfinite())


def _bind(op: Formula, backward: Any, differentiable: tuple[bool, ...]) -> None:
    """The derivative, ``backward(*grads, *outputs)``, and vmap, which goes through the batch."""

    @op.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        return tuple(output)

    def gradient(ctx: Any, saved: Any, *grads: Tensor | None) -> dict[str, Tensor]:
        return {"A": backward(*grads, *saved)}

    op.impl_backward(gradient, output_differentiability=differentiable)

    @op.impl_vmap
    def _(info: Any, in_dims: Any, A: Tensor, *options: Any) -> Any:
        outputs = op(A.movedim(in_dims.A, 0), *options)
        return outputs, (0,) * len(outputs)


# The modules of the rules import this one.
def _svd_backward(*args: Any) -> Tensor:
    from .svd import svd_backward

    return svd_backward(*args)


def _eigh_backward(*args: Any) -> Tensor:
    from .eig import linalg_eig_backward

    return linalg_eig_backward(*args, True)


def _lu_backward(_: None, *args: Any) -> Tensor:
    from .lu import linalg_lu_backward

    return linalg_lu_backward(*args, True)


_bind(svd_jacobi, _svd_backward, (True, True, True))
_bind(eigh_jacobi, _eigh_backward, (True, True))
_bind(lu_small, _lu_backward, (False, True, True))
_bind(svd_small, _svd_backward, (True, True, True))
_bind(eigh_small, _eigh_backward, (True, True))
_bind(lu_finite, _lu_backward, (False, True, True))


# --- with the signatures of PyTorch's operators, which take what is not served ----------------------------------------


def linalg_svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_linalg_svd."""
    thin = not (full_matrices and compute_uv) or A.dim() >= 2 and A.shape[-2] == A.shape[-1]
    if driver is None and thin and _serves(A, _SVD):
        U, S, Vh = svd_small(A, compute_uv)
        return (U, S, Vh) if compute_uv else (A.new_empty(0), S, A.new_empty(0))
    U, S, Vh = torch.ops.aten._linalg_svd(A, full_matrices, compute_uv, driver=driver)
    return U, S, Vh


def linalg_eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """aten::_linalg_eigh."""
    if UPLO.upper() in ("L", "U") and A.shape[-2:-1] == A.shape[-1:] and _serves(A, _EIGH):
        L, V = eigh_small(A, UPLO.upper() == "L", compute_v)
        return L, (V if compute_v else A.new_empty(0))
    L, V = torch.ops.aten._linalg_eigh(A, UPLO, compute_v)
    return L, V


def linalg_lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """aten::linalg_lu."""
    if pivot and _serves(A, _LU):
        P, L, U = lu_finite(A)
        return P, L, U
    P, L, U = torch.ops.aten.linalg_lu(A, pivot=pivot)
    return P, L, U
