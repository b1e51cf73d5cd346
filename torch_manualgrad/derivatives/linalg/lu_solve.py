"""Solves with LU factors: linalg_lu_solve.

$A = P L U$, where $P$ is constant and $L$ and $U$ are packed in one matrix. A solve from the right is a solve from the left
with $X^H$, $B^H$ and $A^H$: $A X = B$ if ``left`` and ``adjoint`` differ, else $A^H X = B$. For these,

    A X = B:     dX = A^-1 (dB - P (dL U + L dU) X),
    A^H X = B:   dX = A^-H (dB - (dL U + L dU)^H P^T X).

For the cotangents, $gB = A^-H gX$ for $A X = B$, and $A^-1 gX$ for $A^H X = B$. The cotangent of $P^T A$ is $-E$, with
$E = P^T gB X^H$ or $P^T X gB^H$, and so that of the packed factors is $-(tril(E U^H, -1) + triu(L^H E))$.

Args:
    LU: the packed factors, (*b, n, n); the batch is broadcast to that of $X$.
    pivots: those of the factorization, (*b, n), int32.
    result: the solution $X$, (*, n, r), or (*, r, n) if not ``left``.
    left, adjoint: the solution is that of $A X = B$, $A^H X = B$ (adjoint), $X A = B$ (not left), $X A^H = B$ (both).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .common import pivots_fit
from .lu import permuted, solve_left


def _lu_solve_backward(
    grad: Tensor, LU: Tensor, pivots: Tensor, result: Tensor, left: bool, adjoint: bool, of_B: bool
) -> tuple[Tensor, Tensor | None]:
    """Cotangents of the packed factors and, if wanted, of $B$.

    For few right-hand sides, the triangles are formed from products with columns; for many, from the matrix product that is
    already available.
    """
    P, L, U = torch.lu_unpack(LU, pivots)
    gX, X = (grad, result) if left else (grad.mH, result.mH)
    few = 2 * X.shape[-1] <= X.shape[-2]
    gB = None
    if left != adjoint:
        V = solve_left(U.mH, gX, upper=False)
        gU = V @ X.mH
        if few or of_B:
            gB = solve_left(L.mH, V, upper=True, unitriangular=True)
        if few:
            assert gB is not None
            gL = gB @ (U @ X).mH
        else:
            gL = solve_left(L.mH, gU, upper=True, unitriangular=True) @ U.mH
        gB = permuted(P, gB) if of_B else None
    else:
        Y = permuted(P.mT, X)
        Z = solve_left(L, permuted(P.mT, gX), upper=False, unitriangular=True)
        gL = Y @ Z.mH
        if few or of_B:
            gB = solve_left(U, Z, upper=True)
        if few:
            assert gB is not None
            gU = (L.mH @ Y) @ gB.mH
        else:
            gU = L.mH @ torch.linalg.solve_triangular(U.mH, gL, upper=False, left=False)
    return -(gL.tril(-1) + gU.triu()).sum_to_size(LU.shape), gB if left or gB is None else gB.mH


@formula(requires=pivots_fit)
def linalg_lu_solve_LU(grad: Tensor, LU: Tensor, pivots: Tensor, result: Tensor, left: bool, adjoint: bool) -> Tensor:
    """Cotangent of the packed factors of $A$, given that of the solution of $A X = B$ or of the three other cases.

    Args:
        grad: cotangent of the solution, its shape.

    Returns:
        The shape of ``LU``.
    """
    return _lu_solve_backward(grad, LU, pivots, result, left, adjoint, False)[0]


@formula(requires=pivots_fit)
def linalg_lu_solve_jvp(
    result: Tensor, LU: Tensor, pivots: Tensor, LU_t: Tensor | None, B_t: Tensor | None, left: bool, adjoint: bool
) -> Tensor:
    """Tangent of the solution of $A X = B$ or of the other cases: $A^-1 (dB - dA X)$, $dA = P (dL U + L dU)$.

    Args:
        LU_t: tangent of the packed factors, (*, n, n). None for zero.
        B_t: tangent of $B$, whose batch is broadcast to that of $X$. None for zero.

    Returns:
        The shape of ``result``.
    """
    R = torch.zeros_like(result) if B_t is None else B_t.expand(result.shape)
    X, R = (result, R) if left else (result.mH, R.mH)
    if LU_t is not None:
        P, L, U = torch.lu_unpack(LU, pivots)
        dL, dU = LU_t.tril(-1), LU_t.triu()
        if left != adjoint:
            dAX = permuted(P, dL @ (U @ X) + L @ (dU @ X))
        else:
            Y = permuted(P.mT, X)
            dAX = U.mH @ (dL.mH @ Y) + dU.mH @ (L.mH @ Y)
        R = R - dAX
    tangent = torch.linalg.lu_solve(LU, pivots, R, adjoint=left == adjoint)
    return tangent if left else tangent.mH


def _lu_solve_vjp(
    grad: Tensor, LU: Tensor, pivots: Tensor, result: Tensor, left: bool, adjoint: bool, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if not output_mask[0]:
        return None, torch.linalg.lu_solve(LU, pivots, grad, left=left, adjoint=not adjoint)
    if not output_mask[1]:
        return linalg_lu_solve_LU(grad, LU, pivots, result, left, adjoint), None
    # autograd sums a gradient to the batch of B
    return _lu_solve_backward(grad, LU, pivots, result, left, adjoint, True)


# -- the rule ---------------------------------------------------------------------------------------------------------


rule(
    "aten::linalg_lu_solve",
    vjp={("LU", "B"): _lu_solve_vjp},
    jvp={"result": linalg_lu_solve_jvp},
    source="ATen linalg_lu_solve_LU, linalg_lu_solve_jvp",
    improves=("missing", "speed"),
)
