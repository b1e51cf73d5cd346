"""The Cholesky factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.libraries import kernel_limit
from ..core.limits import LIMITS
from ..core.rule import ButManySmall, formula, primal_for
from ..derivatives.linalg.cholesky import cholesky_backward, cholesky_rule
from .common import serves

# The calls that are left to PyTorch: larger real or complex matrices, and batches with fewer entries.
_LEFT = ButManySmall(kernel_limit("cholesky_order"), LIMITS["lane_order"], LIMITS["cholesky_entries"])
_SIZES = (_LEFT.order, _LEFT.complex_order, _LEFT.order)


@formula(kernel=("cpu",))
def cholesky_factor(A: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of a positive definite matrix: $A = L L^H$, or $A = U^H U$.

    Args:
        A: (*, n, n) with $n <= 256$ if real, $n <= 32$ if complex; float32, float64, complex64 or complex128. Only one
            triangle is read.
        upper: whether the upper triangle is read, and $U$ returned; otherwise the lower triangle, and $L$.

    Returns:
        $L$ or $U$ (*, n, n), column-major; and info (*), int32: 0 if all is well; the order of the first leading minor that
        is not positive; or -1 if all are positive and an entry of $L$ is not finite.

    Raises:
        RuntimeError: another size or dtype, or not square.

    Note:
        Where not differentiable: where $A$ is not positive definite.

    References:
        Golub and Van Loan, Matrix Computations, 4.2.
    """
    L, info = torch.linalg.cholesky_ex(A, upper=upper)
    info = torch.where(~L.isfinite().all(-1).all(-1) & (info == 0), -1, info)
    return L.mT.contiguous().mT, info


@formula(kernel=("default",))
def cholesky_small(A: Tensor, upper: bool, check_errors: bool) -> tuple[Tensor, Tensor]:
    """`cholesky_factor`; for a batch with a matrix that is not positive definite or not finite, LAPACK's results or error.

    Args:
        A: as in `cholesky_factor`.
        upper: as in `cholesky_factor`.
        check_errors: whether a matrix that is not positive definite raises.

    Returns:
        $L$ or $U$, and info, as in `cholesky_factor`.

    Raises:
        torch.linalg.LinAlgError: as `torch.linalg.cholesky`, if ``check_errors``.

    Note:
        Where not differentiable: where $A$ is not positive definite. A matrix that is singular up to rounding may have a
        factor here and none in LAPACK.

    References:
        `cholesky_factor`; ATen linalg_cholesky_ex.
    """
    return cholesky_factor.reference(A, upper)


@cholesky_small.impl("default")
def _(A: Tensor, upper: bool, check_errors: bool) -> tuple[Tensor, Tensor]:
    L, info = cholesky_factor(A, upper)
    if not info.any():
        return L, info
    L, info = torch.ops.aten.linalg_cholesky_ex(A, upper=upper, check_errors=check_errors)
    return L.mT.contiguous().mT, info


for _op in (cholesky_factor, cholesky_small):

    @_op.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        return output[0], inputs.upper

    def _gradient(ctx: Any, saved: Any, gL: Tensor | None, _: None) -> dict[str, Tensor | None]:
        return {"A": None if gL is None else cholesky_backward(gL, *saved)}

    _op.impl_backward(_gradient, output_differentiability=(True, False))


@primal_for(cholesky_rule, leaves=_LEFT)
def linalg_cholesky_ex(A: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """aten::linalg_cholesky_ex."""
    if serves(A, _SIZES) and A.shape[-2] == A.shape[-1] and A.numel() >= _LEFT.entries:
        L, info = cholesky_small(A, upper, check_errors)
        return L, info
    L, info = torch.ops.aten.linalg_cholesky_ex(A, upper=upper, check_errors=check_errors)
    return L, info
