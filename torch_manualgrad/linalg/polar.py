"""The polar decomposition and the problems that it solves: polar, procrustes, kabsch.

$A = U P$ with $U^H U = I$ and $P$ Hermitian; $U = W V^H$ and $P = V S V^H$ in terms of $A = W S V^H$. For a change $E$
of $A$,

    $dU = U X + (E - U U^H E) P^-1$,   with   $P X + X P = U^H E - E^H U$,

a Lyapunov equation, whose solution divides by sums $s_i + s_j$ of singular values and never by their differences:
repeated singular values need no special treatment, and all orders are exact (derivatives/linalg/lyapunov.py). Because
$U$ is the gradient of the sum of the singular values, $E -> dU$ is self-adjoint: the vjp is the jvp. A rotation, with
$det = 1$, is $U$ with the last column of $W$ negated if necessary. It is the polar factor for the $P$ with $s_n$ negated, and
all of the above holds. It is smooth also where $det A = 0$, if $s_(n-1) > 0$.

Note:
    Where not differentiable: where $s_i + s_j = 0$ ($rank <= n - 2$; for complex or rectangular $A$, $rank <= n - 1$;
    for a rotation with a negated column, $s_(n-1) = s_n$). The factor is not unique there, and $U$ is one of the possible
    ones. The part of the derivative that does not exist is 0: the equation is solved in the least-squares sense, with the
    pseudo-inverse as $P^-1$. A sum counts as 0 up to rounding, $n eps s_1$.

References:
    Kenney and Laub, SIAM J. Matrix Anal. Appl. 12 (1991) 488; Higham, Functions of Matrices (SIAM 2008), chapter 8 and
    theorem 8.9; Kabsch, Acta Cryst. A32 (1976) 922; Schoenemann, Psychometrika 31 (1966) 1.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..derivatives.linalg.lyapunov import hermitian_inverse, skew_lyapunov
from ..derivatives.linalg.smooth import hermitian, smooth, svd
from .arguments import DtypeError, fits, matrix, positive_weights

__all__ = ["Alignment", "Polar", "kabsch", "polar", "procrustes"]


class Polar(NamedTuple):
    """The result of `polar`: $U$ and $P$."""

    U: Tensor
    P: Tensor


class Alignment(NamedTuple):
    """The result of `kabsch`: rotation, translation and rmsd."""

    rotation: Tensor
    translation: Tensor
    rmsd: Tensor


# -- the operator ---------------------------------------------------------------------------------------------------


def _polar_derivative(inputs: Any, U: Tensor, E: Tensor) -> Tensor:
    A, _, S, V, unitary = inputs
    P = hermitian(U.mH @ A)
    Z = U.mH @ E
    change = U @ skew_lyapunov(P, S, V, 2 * Z)
    return change if unitary else change + (E - U @ Z) @ hermitian_inverse(P, S, V)


def _polar_vjp(needed: Any, inputs: Any, U: Tensor, grad: Tensor) -> dict[str, Tensor]:
    return {"A": _polar_derivative(inputs, U, grad)}


def _polar_jvp(inputs: Any, U: Tensor, tangents: Any) -> Tensor | None:
    return None if tangents.A is None else _polar_derivative(inputs, U, tangents.A)


@smooth(vjp=_polar_vjp, jvp=_polar_jvp)
def polar_factor(A: Tensor, W: Tensor, S: Tensor, V: Tensor, unitary: bool) -> Tensor:
    """$U = W V^H$, the polar factor of $A = W diag(S) V^H$.

    Args:
        A: (*, m, n), $m >= n$. Its value is not read.
        W: (*, m, n), a constant to every derivative. A column may be negated, or 0, together with its entry in $S$.
        S: (*, n), the largest magnitude first; constant.
        V: (*, n, n), unitary; constant.
        unitary: whether $U U^H = I$. A part of the derivative is then 0 and is left out.

    Returns:
        (*, m, n).

    Note:
        Where not differentiable: see the module's docstring.

    References:
        Kenney and Laub, SIAM J. Matrix Anal. Appl. 12 (1991) 488, theorem 2.2.
    """
    return W @ V.mH


# -- public functions -----------------------------------------------------------------------------------------------


def _unitary_factor(A: Tensor) -> Tensor:
    if A.shape[-2] < A.shape[-1]:
        return _unitary_factor(A.mH).mH
    return polar_factor(A, *svd(A), A.shape[-2] == A.shape[-1])


def _rotation_factor(A: Tensor) -> Tensor:
    """The rotation nearest to a real square $A$."""
    W, S, V = svd(A)
    reversed_ = torch.linalg.det(W @ V.mH) < 0
    last = torch.arange(A.shape[-1], device=A.device) == A.shape[-1] - 1
    signs = torch.where(reversed_.unsqueeze(-1) & last, -1, 1).to(S.dtype)
    return polar_factor(A, W * signs.unsqueeze(-2), S * signs, V, True)


@checked
def polar(A: Tensor, side: Literal["right", "left"] = "right") -> Polar:
    """The polar decomposition $A = U P$, or $A = P U$; exact derivatives also where singular values repeat.

    Args:
        A: (*, m, n), real or complex.
        side: the side of $P$: "right", $A = U P$ with $P$ (*, n, n); "left", $A = P U$ with $P$ (*, m, m).

    Returns:
        `Polar`: $U$ (*, m, n), with orthonormal columns, or rows if $m < n$: the nearest such matrix to $A$. $P$ is
        Hermitian positive semidefinite.

    Raises:
        TypeError: $A$ is neither floating point nor complex.
        ValueError: $A$ is not a matrix, or ``side`` is unknown.

    Note:
        Where not differentiable: where $A$ does not have full rank, $U$ and its derivative are not completely determined.
        The undetermined part of the derivative is 0. A square real $A$ may have rank $n - 1$: the derivative is then that
        of the chosen branch of $U$.

    References:
        Higham, Functions of Matrices, chapter 8; Kenney and Laub, SIAM J. Matrix Anal. Appl. 12 (1991) 488.
    """
    A = matrix(A, "A")
    U = _unitary_factor(A)
    return Polar(U, hermitian(U.mH @ A if side == "right" else A @ U.mH))


@checked
def procrustes(A: Tensor, B: Tensor, rotation: bool = False) -> Tensor:
    """The orthogonal (unitary) $R$ that minimizes $||A R - B||_F$; exact derivatives also where singular values repeat.

    Args:
        A: (*, m, n), real or complex; batch dims broadcast.
        B: (*, m, n), real or complex; batch dims broadcast.
        rotation: whether $R$ is restricted to $det R = 1$; for real $A$ and $B$.

    Returns:
        $R$, (*, n, n): the polar factor of $A^H B$, with the last singular vector negated if ``rotation`` requires it.

    Raises:
        TypeError: neither floating point nor complex, or complex with ``rotation``.
        ValueError: shapes that do not fit.

    Note:
        Where not differentiable: where `polar` of $A^H B$ is not. With ``rotation``: where $R$ is not unique, that is, if
        the two smallest singular values are 0, or if they are equal and $det(A^H B) < 0$.

    References:
        Schoenemann, Psychometrika 31 (1966) 1.
    """
    A = matrix(A, "A")
    B = fits(matrix(B, "B"), "B", A, "A")
    if rotation and A.is_complex():
        raise DtypeError(f"rotation: expected False for complex A and B, got True for {A.dtype}")
    M = A.mH @ B
    return _rotation_factor(M) if rotation else _unitary_factor(M)


@checked
def kabsch(P: Tensor, Q: Tensor, weights: Tensor | None = None) -> Alignment:
    """The rigid motion that best maps the points $P$ to the points $Q$: it minimizes $sum_k w_k |R p_k + t - q_k|^2$.

    The derivatives are exact also where the singular values of the covariance repeat, as for symmetric sets of points.

    Args:
        P: (*, N, d), real: $N$ points, one per row; batch dims broadcast.
        Q: (*, N, d), real: $N$ points, one per row; batch dims broadcast.
        weights: (*, N), real, finite and not negative, and not all 0; None: all equal.

    Returns:
        `Alignment`: $R$ (*, d, d) with $det R = 1$; $t$ (*, d), so that ``P @ R.mT + t[..., None, :]`` is near $Q$; and
        the rmsd (*), the root of the weighted mean squared distance that remains.

    Raises:
        TypeError: not real floating point.
        ValueError: shapes that do not fit; weights that are negative, nan or inf, or all 0. Under a transform and in a
            graph, where weights cannot be read, invalid ones become nan instead.

    Note:
        Where not differentiable: where `procrustes` with ``rotation`` is not (points on a line in three dimensions;
        mirror images for which two axes are equally bad). The derivatives of the rmsd are 0 where it is 0.

    References:
        Kabsch, Acta Cryst. A32 (1976) 922.
    """
    P = matrix(P, "P")
    if P.is_complex():
        raise DtypeError(f"P: expected real points, got {P.dtype}")
    Q = fits(matrix(Q, "Q"), "Q", P, "P")
    w = P.new_ones(P.shape[-2]) if weights is None else positive_weights(weights, "weights", P)
    w = (w / w.sum(-1, keepdim=True)).unsqueeze(-1)
    p, q = (w * P).sum(-2, keepdim=True), (w * Q).sum(-2, keepdim=True)
    R = _rotation_factor((w * (Q - q)).mT @ (P - p))
    t = q - p @ R.mT
    square = (w * (P @ R.mT + t - Q).square()).sum((-2, -1))
    vanishing = square == 0
    rmsd = torch.where(vanishing, 0, torch.where(vanishing, 1, square).sqrt())
    return Alignment(R, t.squeeze(-2), rmsd)
