"""Linear systems, by Gaussian elimination."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.libraries import kernel_limit
from ..core.limits import LIMITS
from ..core.rule import ButManySmall, formula, primal_for
from ..derivatives.linalg.solve import linalg_solve_backward, solve_rule
from .common import serves

# The calls that are left to PyTorch: larger real or complex matrices, and batches with fewer entries.
_LEFT = ButManySmall(kernel_limit("elimination_order"), LIMITS["elimination_lanes"], LIMITS["elimination_entries"])
_SIZES = (_LEFT.order, _LEFT.complex_order, _LEFT.order)


@formula(kernel=("cpu",))
def gaussian_elimination(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The solution of $A X = B$ and the factors of $A$, with partial pivoting and LAPACK's choice of the pivot.

    Args:
        A: (*, n, n) with $n <= 512$ if real, $n <= 32$ if complex; float32, float64, complex64 or complex128.
        B: (*, n, r), of the same batch and dtype, with $r <= n$ or $r <= 32$.

    Returns:
        $X$ (*, n, r); the packed factors $LU$ (*, n, n), column-major; the pivots (*, n), int32, counted from one; and
        info (*), int32: 0 if all is well; the number of the first zero pivot; or -1 if no pivot is zero and a result is not
        finite, or the inverse of a pivot is not a normal number.

    Raises:
        RuntimeError: another size or dtype, or not square.

    Note:
        Where not differentiable: where $A$ is singular. Only $X$ has a derivative.

    References:
        Golub and Van Loan, Matrix Computations, 3.4.
    """
    LU, pivots, info = torch.linalg.lu_factor_ex(A)
    X = torch.linalg.lu_solve(LU, pivots, B)
    bad = ~(LU.isfinite().all((-2, -1)) & X.isfinite().all((-2, -1)))
    info = torch.where(bad & (info == 0), -1, info)
    return X.contiguous(), LU.mT.contiguous().mT, pivots, info


@formula(kernel=("default",))
def solve_small(A: Tensor, B: Tensor, check_errors: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gaussian_elimination`; for a batch with a matrix that is singular or not finite, LAPACK's results or error.

    Args:
        A: as in `gaussian_elimination`.
        B: as in `gaussian_elimination`.
        check_errors: whether a singular matrix raises.

    Returns:
        $X$, $LU$, the pivots and info, as in `gaussian_elimination`.

    Raises:
        torch.linalg.LinAlgError: as `torch.linalg.solve`, if ``check_errors``.

    Note:
        Where not differentiable: where $A$ is singular.

    References:
        `gaussian_elimination`; ATen _linalg_solve_ex.
    """
    return gaussian_elimination.reference(A, B)


@solve_small.impl("default")
def _(A: Tensor, B: Tensor, check_errors: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    X, LU, pivots, info = gaussian_elimination(A, B)
    if not info.any():
        return X, LU, pivots, info
    X, LU, pivots, info = torch.ops.aten._linalg_solve_ex(A, B, check_errors=check_errors)
    return X.contiguous(), LU.mT.contiguous().mT, pivots, info


for _op in (gaussian_elimination, solve_small):

    @_op.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        X, LU, pivots, _ = output
        return inputs.A, X, LU, pivots

    def _gradient(ctx: Any, saved: Any, gX: Tensor | None, *_: None) -> dict[str, Tensor | None]:
        A, X, LU, pivots = saved
        gA, gB = (None, None) if gX is None else linalg_solve_backward(gX, X, A, LU, pivots, True)
        return {"A": gA, "B": gB}

    _op.impl_backward(_gradient, output_differentiability=(True, False, False, False))


def _serves(A: Tensor, B: Tensor) -> bool:
    """Whether `gaussian_elimination` solves $A X = B$ for matrices $B$, and is faster than LAPACK."""
    if not serves(A, _SIZES) or A.numel() < _LEFT.entries:
        return False
    if A.dtype == torch.float64 and A.shape[-1] > LIMITS["elimination_double"]:
        return False
    fits = A.shape[-2] == A.shape[-1] and B.shape[:-1] == A.shape[:-1] and A.dtype == B.dtype and A.device == B.device
    return fits and B.shape[-1] <= max(A.shape[-1], LIMITS["lane_order"])


@primal_for(solve_rule, leaves=_LEFT)
def linalg_solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::_linalg_solve_ex."""
    vector = A.dim() >= 2 and B.shape == A.shape[:-1]
    columns = B.unsqueeze(-1) if vector else B
    if left and _serves(A, columns):
        X, LU, pivots, info = solve_small(A, columns, check_errors)
        return (X.squeeze(-1) if vector else X), LU, pivots, info
    X, LU, pivots, info = torch.ops.aten._linalg_solve_ex(A, B, left=left, check_errors=check_errors)
    return X, LU, pivots, info
