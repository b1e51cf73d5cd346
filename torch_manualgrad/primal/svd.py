"""The thin singular value decomposition of small matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.limits import LIMITS
from ..core.rule import formula, primal_for
from ..derivatives.linalg.svd import svd_backward, svd_rule
from .common import bind, finite, serves
from .threads import on_threads

# Upper limits: the smaller dimension of a real and of a complex matrix, and the larger dimension. Up to these a
# single matrix takes no longer than with LAPACK.
_SIZES = (LIMITS["jacobi_rank"], LIMITS["svd_complex"], LIMITS["jacobi_order"])


@formula(kernel=("cpu", "cuda"))
def svd_jacobi(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin singular value decomposition by one-sided Jacobi rotations.

    Args:
        A: (*, m, n) with $min(m, n) <= 16$ and $max(m, n) <= 32$; float32, float64, complex64 or complex128.

    Returns:
        $U$ (*, m, k), $S$ (*, k), descending, and $Vh$ (*, k, n) with $k = min(m, n)$. The singular vectors of zero
        singular values are orthonormal too.

    Raises:
        RuntimeError: another size or dtype.

    Note:
        Where not differentiable: as `svd_backward`.

    References:
        Drmac and Veselic, New fast and accurate Jacobi SVD algorithm I (2008).
    """
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    return U.contiguous(), S, Vh.contiguous()


@formula(kernel=("default",))
def svd_small(A: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """`svd_jacobi`; if $A$ holds inf or nan, LAPACK's error or result.

    Args:
        A: as in `svd_jacobi`.
        vectors: whether to compute $U$ and $Vh$: LAPACK's error depends on it.

    Returns:
        $U$ (*, m, k), $S$ (*, k) and $Vh$ (*, k, n); $U$ and $Vh$ are undefined if not ``vectors``.

    Raises:
        torch.linalg.LinAlgError: as `torch.linalg.svd`, or `torch.linalg.svdvals`.

    Note:
        Where not differentiable: as `svd_backward`.

    References:
        `svd_jacobi`; ATen _linalg_svd.
    """
    return svd_jacobi.reference(A)


@svd_small.impl("default")
def _(A: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    U, S, Vh = svd_jacobi(A)
    if finite(S):
        return U, S, Vh
    left, S, right = torch.ops.aten._linalg_svd(A, False, vectors)
    return (left.contiguous(), S, right.contiguous()) if vectors else (U, S, Vh)


bind(svd_jacobi, svd_backward, (True, True, True))
bind(svd_small, svd_backward, (True, True, True))


@primal_for(svd_rule)
def linalg_svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_linalg_svd."""
    thin = not (full_matrices and compute_uv) or A.dim() >= 2 and A.shape[-2] == A.shape[-1]
    if driver is None and thin and serves(A, _SIZES):
        U, S, Vh = svd_small(A, compute_uv)
        return (U, S, Vh) if compute_uv else (A.new_empty(0), S, A.new_empty(0))
    if driver is not None:
        U, S, Vh = torch.ops.aten._linalg_svd(A, full_matrices, compute_uv, driver=driver)
    else:
        U, S, Vh = on_threads(torch.ops.aten._linalg_svd, ("U", "S", "Vh"), compute_uv, A, full_matrices, compute_uv)
    return U, S, Vh
