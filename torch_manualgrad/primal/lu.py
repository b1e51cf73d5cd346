"""The LU factorization of small matrices, with partial pivoting."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.limits import LIMITS
from ..core.rule import ButManySmall, formula, primal_for
from ..derivatives.linalg.lu import linalg_lu_backward, lu_rule
from .common import bind, finite, serves

# Upper limits: the smaller dimension of a real and of a complex matrix, and the larger dimension. Up to these a
# single matrix takes no longer than with LAPACK.
_SIZES = (LIMITS["lu_small_order"],) * 3


@formula(kernel=("cpu", "cuda"))
def lu_small(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LU factorization, $A = P L U$, with partial pivoting and LAPACK's choice of the pivot: the first of the largest.

    Args:
        A: (*, m, n) with $m$, $n <= 8$; float32, float64, complex64 or complex128.

    Returns:
        $P$ (*, m, m), $L$ (*, m, k), $U$ (*, k, n) with $k = min(m, n)$.

    Raises:
        RuntimeError: another size or dtype.

    Note:
        Where not differentiable: as `linalg_lu_backward`.

    References:
        Golub and Van Loan, Matrix Computations, 3.4.
    """
    P, L, U = torch.linalg.lu(A)
    return P.contiguous(), L.contiguous(), U.contiguous()


@formula(kernel=("default",))
def lu_finite(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`lu_small`; if a factor holds inf or nan, LAPACK's result, which has nan in other entries.

    Args:
        A: as in `lu_small`.

    Returns:
        $P$ (*, m, m), $L$ (*, m, k), $U$ (*, k, n) with $k = min(m, n)$.

    Note:
        Where not differentiable: as `linalg_lu_backward`.

    References:
        `lu_small`; ATen linalg_lu.
    """
    return lu_small.reference(A)


@lu_finite.impl("default")
def _(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    P, L, U = lu_small(A)
    if not (finite(L) and finite(U)):
        P, L, U = (x.contiguous() for x in torch.ops.aten.linalg_lu(A))
    return P, L, U


def _backward(_: None, gL: Tensor | None, gU: Tensor | None, P: Tensor, L: Tensor, U: Tensor) -> Tensor:
    return linalg_lu_backward(gL, gU, P, L, U, True)


bind(lu_small, _backward, (False, True, True))
bind(lu_finite, _backward, (False, True, True))


@primal_for(lu_rule, leaves=ButManySmall(_SIZES[0], _SIZES[1], 0))
def linalg_lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """aten::linalg_lu."""
    if pivot and serves(A, _SIZES):
        P, L, U = lu_finite(A)
        return P, L, U
    P, L, U = torch.ops.aten.linalg_lu(A, pivot=pivot)
    return P, L, U
