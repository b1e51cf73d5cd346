"""Least squares: linalg_lstsq.

With the pseudo-inverse $P$ of $A$ (see pinv.py), the least-squares solution of minimal norm is $X = P B$, with the
remainder $R = B - A X$. At constant rank of $A$,

    dX = P (dB - dA X) + (I - P A) dA^H P^H X + P P^H dA^H R.

The second term vanishes for full column rank, the third for full row rank. The adjoint, with $Y = P^H gX$, is

    gB = Y,    gA = -Y X^H + P^H X (gX - P A gX)^H + R (P Y)^H.

The residuals $L = sum_i |R_i|^2$ of each column exist at full column rank only, where $A^H R = 0$:

    dL = 2 Re sum_i conj(R_i) (dB - dA X)_i,    gB = 2 R gL,    gA = -gB X^H.

Without a tolerance, only singular values that are zero to rounding are dropped, and this is the derivative. With a
tolerance, $P$ has the derivative of a truncated pseudo-inverse (see pinv.py).

Args:
    rank: as linalg.lstsq returned it; see `lstsq_pinv`.
    rcond: the tolerance of the call.
    self: $A$, (*, m, n).
    b: $B$, (*, m, k), or (*, m) with one dim less than $A$.
    solution: $X$, (*, n, k) or (*, n).
    self_t: tangent of $A$, (*, m, n). None for zero.
    b_t: tangent of $B$, its shape. None for zero.

Note:
    Where not differentiable: where the rank of a matrix changes. The result is the derivative at constant rank.
    Directions that raise the rank are left out, as with the SVD. This holds for gelsy too, although its forward depends on
    the order of its pivots there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .common import magnitude, of_finite
from .pinv import pinv_backward, pinv_jvp, pinv_truncated_backward, pinv_truncated_jvp


def _pinv(A: Tensor, rank: Tensor, rcond: float | None) -> Tensor:
    """linalg.pinv with the tolerance of the driver, for which a negative value means the precision of the dtype."""
    if rank.numel() == 0:
        rcond = 0.0
    elif rcond is not None and rcond < 0:
        rcond = torch.finfo(A.dtype).eps
    return of_finite(partial(torch.linalg.pinv, rtol=rcond), A)


@formula(kernel=("default",))
def lstsq_pinv(A: Tensor, rank: Tensor, rcond: float | None) -> Tensor:
    """The pseudo-inverse of $A$, whose rank linalg.lstsq has found; its derivatives are those of linalg.pinv.

    A matrix of full rank needs no singular values: with $A = Q R$ (or $A^H = Q R$ if $A$ is wide) the pseudo-inverse is
    $(Q R^-H)^H$ (or $Q R^-H$).

    Args:
        A: (*, m, n), real or complex.
        rank: integers, (*), as linalg.lstsq returns it, or (0,) from a driver that assumes full rank.
        rcond: singular values up to rcond times the largest count as zeros; None: $max(m, n)$ times the precision. It
            is not used where the rank is full.

    Returns:
        (*, n, m).

    Raises:
        LinAlgError: the singular values do not converge.

    References:
        Golub and Van Loan, Matrix Computations, 5.5.
    """
    return _pinv(A, rank, rcond)


@lstsq_pinv.impl("default")
def _(A: Tensor, rank: Tensor, rcond: float | None) -> Tensor:
    tall = A.shape[-2] >= A.shape[-1]
    if A.numel() == 0 or rank.numel() and not bool((rank == min(A.shape[-2:])).all()):
        return _pinv(A, rank, rcond)
    Q, R = torch.linalg.qr(A if tall else A.mH)
    P = torch.linalg.solve_triangular(R.mH, Q, upper=False, left=False)
    return (P.mH if tall else P).resolve_conj().contiguous()


def _drops(rank: Tensor, rcond: float | None) -> bool:
    """Whether singular values that are not zero may have been dropped."""
    return rank.numel() > 0 and rcond is not None and rcond > 0


lstsq_pinv.impl_save_for_backward(lambda inputs, output: (inputs, output))


@lstsq_pinv.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor | None]:
    (A, rank, rcond), P = saved
    return {"A": (pinv_truncated_backward if _drops(rank, rcond) else pinv_backward)(grad, P, A), "rank": None}


@lstsq_pinv.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    A, rank, rcond = inputs
    return (
        None if tangents.A is None else (pinv_truncated_jvp if _drops(rank, rcond) else pinv_jvp)(A, output, tangents.A)
    )


def _matrix(A: Tensor, B: Tensor) -> Tensor:
    """$B$ as (*, m, k): for $A$ (*, m, n) it may be one right-hand side, (*, m)."""
    return B.unsqueeze(-1) if B.dim() < A.dim() else B


def _normalized(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """$c$, $A / c$ and $B / c$. The solution is the same, and products of two pseudo-inverses neither overflow nor vanish."""
    size = magnitude(A)
    return size, A / size, _matrix(A, B) / size


def _residuals_backward(grad_residuals: Tensor | None, A: Tensor, B: Tensor, X: Tensor) -> Tensor | None:
    """The cotangent $2 R gL$ of $B$, given that of the residuals; None if there are no residuals."""
    if grad_residuals is None or grad_residuals.numel() == 0:
        return None
    return 2 * grad_residuals.unsqueeze(-2) * (_matrix(A, B) - A @ _matrix(A, X))


def _b_backward(solution_part: Tensor | None, residuals_part: Tensor | None, A: Tensor, B: Tensor) -> Tensor:
    """The cotangent of $B$: the sum of its parts, in its shape."""
    parts = [g for g in (solution_part, residuals_part) if g is not None]
    if not parts:
        return torch.zeros_like(B)
    return sum(parts[1:], parts[0]).sum_to_size(_matrix(A, B).shape).reshape(B.shape)


@formula
def linalg_lstsq_backward(
    grad_solution: Tensor | None,
    grad_residuals: Tensor | None,
    self: Tensor,
    b: Tensor,
    solution: Tensor,
    rank: Tensor,
    rcond: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of $A$ and $B$, given those of the least-squares solution and of the residuals.

    Args:
        grad_solution: cotangent of the solution, (*, n, k) or (*, n). None for zero.
        grad_residuals: cotangent of the residuals, (*, k), real; anything empty if there are no residuals. None for zero.

    Returns:
        $gA$ and $gB$, of the shapes of ``self`` and ``b``.

    References:
        ATen linalg_lstsq_backward; the module's docstring.
    """
    A, gA, Y = self, torch.zeros_like(self), None
    if grad_solution is not None:
        size, A_1, B_1 = _normalized(A, b)
        G, P = _matrix(A, grad_solution), lstsq_pinv(A_1, rank, rcond)
        X, Y = P @ B_1, P.mH @ G  # not the X of the forward, whose last bits vary with gelsy
        if _drops(rank, rcond):
            gA = pinv_truncated_backward(G @ B_1.mH, P, A_1)
        elif G.shape[-1] > min(A.shape[-2:]):  # fewer products, since X = P B
            gA = pinv_backward(G @ B_1.mH, P, A_1)
        else:
            gA = (P.mH @ X) @ (G - P @ (A_1 @ G)).mH - Y @ X.mH + (B_1 - A_1 @ X) @ (P @ Y).mH
        gA, Y = gA / size, Y / size
    S = _residuals_backward(grad_residuals, A, b, solution)
    if S is not None:
        gA = gA - S @ _matrix(A, solution).mH
    return gA.sum_to_size(A.shape), _b_backward(Y, S, A, b)


@formula
def linalg_lstsq_solution_jvp(
    self: Tensor,
    b: Tensor,
    self_t: Tensor | None,
    b_t: Tensor | None,
    solution: Tensor,
    rank: Tensor,
    rcond: float | None = None,
) -> Tensor:
    """Tangent of the least-squares solution: $P (dB - dA X) + (I - P A) dA^H P^H X + P P^H dA^H R$.

    Returns:
        The shape of ``solution``.

    References:
        ATen linalg_lstsq_solution_jvp; the module's docstring.
    """
    size, A_1, B_1 = _normalized(self, b)
    P = lstsq_pinv(A_1, rank, rcond)
    dB = None if b_t is None else _matrix(self, b_t) / size
    if self_t is None:
        return torch.zeros_like(solution) if dB is None else (P @ dB).reshape(solution.shape)
    X, dA = _matrix(self, solution), self_t / size
    if _drops(rank, rcond):
        dX = pinv_truncated_jvp(A_1, P, dA) @ B_1
        return (dX if dB is None else dX + P @ dB).reshape(solution.shape)
    turned = dA.mH @ (P.mH @ X)
    inside = P.mH @ (dA.mH @ (B_1 - A_1 @ X)) - dA @ X - A_1 @ turned
    if dB is not None:
        inside = inside + dB
    return (P @ inside + turned).reshape(solution.shape)


@formula
def linalg_lstsq_jvp(self: Tensor, b: Tensor, self_t: Tensor, b_t: Tensor) -> Tensor:
    """Tangent of the least-squares solution, which is recomputed: `linalg_lstsq_solution_jvp`.

    Args:
        self_t: tangent of $A$, (*, m, n).
        b_t: tangent of $B$, its shape.

    Returns:
        (*, n, k) or (*, n).

    References:
        ATen linalg_lstsq_jvp, of older releases.
    """
    X, _, rank, _ = torch.linalg.lstsq(self, b)
    return linalg_lstsq_solution_jvp(self, b, self_t, b_t, X, rank)


@formula
def linalg_lstsq_residuals_jvp(
    self: Tensor, b: Tensor, self_t: Tensor | None, b_t: Tensor | None, solution: Tensor, residuals: Tensor
) -> Tensor:
    """Tangent of the residuals $L = sum_i |R_i|^2$, $R = B - A X$: $2 Re sum_i conj(R_i) (dB - dA X)_i$.

    Args:
        residuals: $L$, (*, k), real; empty, like their tangent, if the operator returns none.

    Returns:
        The shape of ``residuals``, real.

    References:
        ATen linalg_lstsq_residuals_jvp; the module's docstring.
    """
    if residuals.numel() == 0 or self_t is None and b_t is None:
        return torch.zeros_like(residuals)
    X = _matrix(self, solution)
    R = _matrix(self, b) - self @ X
    change = -(self_t @ X) if self_t is not None else torch.zeros_like(R)
    if b_t is not None:
        change = change + _matrix(self, b_t)
    return 2 * (R.conj() * change).sum(-2).real if R.is_complex() else 2 * (R * change).sum(-2)


def _lstsq_vjp(
    grad_solution: Tensor | None,
    grad_residuals: Tensor | None,
    self: Tensor,
    b: Tensor,
    solution: Tensor,
    rank: Tensor,
    rcond: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor]:
    if output_mask[0]:
        return linalg_lstsq_backward(grad_solution, grad_residuals, self, b, solution, rank, rcond)
    G = grad_solution
    Y = None if G is None else lstsq_pinv(self, rank, rcond).mH @ _matrix(self, G)
    return None, _b_backward(Y, _residuals_backward(grad_residuals, self, b, solution), self, b)


# -- the rule ---------------------------------------------------------------------------------------------------------


rule(
    "aten::linalg_lstsq",
    vjp={("self", "b"): _lstsq_vjp},
    jvp={"solution": linalg_lstsq_solution_jvp, "residuals": linalg_lstsq_residuals_jvp},
    not_differentiable=("rank", "singular_values"),
    improves=("values", "speed"),
    gaps={"fake": "the shape of the residuals depends on the rank, which fake tensors do not have"},
    source="ATen linalg_lstsq_backward, linalg_lstsq_solution_jvp, linalg_lstsq_residuals_jvp",
)
