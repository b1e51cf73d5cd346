"""The equation $P X + X P = C$ for a Hermitian $P = V diag(L) V^H$, and the inverse of $P$.

With $X~ = V^H X V$ and $C~ = V^H C V$, $X~_ij = C~_ij / (l_i + l_j)$: it divides by sums of eigenvalues and never by their
differences, so repeated eigenvalues need no special treatment. The derivatives of the solution and of $P^-1$ are made of
the same two operators:

    $dX$ is the solution for  $dC - dP X - X dP$,        $d(P^-1) = -P^-1 dP P^-1$,

so that all orders are exact.

Args:
    P: Hermitian, (*, n, n). Its value is not read: $L$ and $V$ determine it.
    L: its eigenvalues (*, n); a constant to every derivative.
    V: its eigenvectors (*, n, n); constant.
    C: (*, n, n).

References:
    Higham, Functions of Matrices (SIAM 2008), section 10.6 and theorem 8.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import skew, sym
from .smooth import smooth

__all__ = ["eigenpairs", "hermitian_inverse", "hermitian_lyapunov", "skew_lyapunov"]


def eigenpairs(P: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of $P$, in ascending order, and its eigenvectors, without history. The lower triangle is read.

    The eigenvalues of a matrix that is not finite are nan. `torch.linalg.eigh` may raise there, also for a batch with others.
    """
    P = P.detach().tril()
    finite = P.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    L, V = torch.linalg.eigh(torch.where(finite, P, 0))
    return torch.where(finite.squeeze(-1), L, torch.nan), V


def _reciprocal(sums: Tensor, L: Tensor) -> Tensor:
    """1 / sums, and 0 where they are zero to rounding. $L$: the eigenvalues that were added, a largest one first."""
    scale = L[..., :1].abs() * (L.shape[-1] * torch.finfo(L.dtype).eps)
    scale = scale.reshape(*scale.shape, *(1,) * (sums.dim() - L.dim()))
    zero = sums.abs() <= scale
    return torch.where(zero, 0, 1 / torch.where(zero, 1, sums))


def _sums(L: Tensor) -> Tensor:
    return L.unsqueeze(-1) + L.unsqueeze(-2)


# -- the equation -----------------------------------------------------------------------------------------------------


def _solve(sign: int, *args: Tensor) -> Tensor:
    return (hermitian_lyapunov if sign > 0 else skew_lyapunov)(*args)


def _solution(sign: int) -> dict[str, Callable[..., Any]]:
    """The derivatives of the operator whose solutions have $X^H = sign X$."""

    def vjp(needed: Any, inputs: Any, X: Tensor, grad: Tensor) -> dict[str, Tensor]:
        P, L, V, _ = inputs
        Y = _solve(sign, P, L, V, grad)
        return {"P": -sign * (Y @ X + X @ Y), "C": Y}

    def jvp(inputs: Any, X: Tensor, tangents: Any) -> Tensor | None:
        P, L, V, _ = inputs
        C, dP = tangents.C, tangents.P
        if dP is not None:
            turned = dP @ X + X @ dP
            C = -turned if C is None else C - turned
        return None if C is None else _solve(sign, P, L, V, C)

    return {"vjp": vjp, "jvp": jvp}


@smooth(**_solution(-1))
def skew_lyapunov(P: Tensor, L: Tensor, V: Tensor, C: Tensor) -> Tensor:
    """The skew-Hermitian $X$ with $P X + X P = (C - C^H) / 2$.

    Args:
        L: an eigenvalue of the largest magnitude comes first.

    Returns:
        (*, n, n).

    Note:
        Where not differentiable: at $l_i + l_j = 0$, where $X~_ij$ and its derivatives are 0.
    """
    rotated = V.mH @ C @ V
    # after the rotation, so that a real diagonal is exactly 0
    return V @ (0.5 * skew(rotated) * _reciprocal(_sums(L), L)) @ V.mH


@smooth(**_solution(1))
def hermitian_lyapunov(P: Tensor, L: Tensor, V: Tensor, C: Tensor) -> Tensor:
    """The Hermitian $X$ with $P X + X P = (C + C^H) / 2$.

    Returns:
        (*, n, n).

    Note:
        Where not differentiable: at $l_i + l_j = 0$, where the result is inf or nan.
    """
    return V @ (0.5 * sym(V.mH @ C @ V) / _sums(L)) @ V.mH


# -- the inverse ------------------------------------------------------------------------------------------------------


def _inverse_vjp(needed: Any, inputs: Any, X: Tensor, grad: Tensor) -> dict[str, Tensor]:
    return {"P": -(X @ grad @ X)}


def _inverse_jvp(inputs: Any, X: Tensor, tangents: Any) -> Tensor | None:
    return None if tangents.P is None else -(X @ tangents.P @ X)


@smooth(vjp=_inverse_vjp, jvp=_inverse_jvp)
def hermitian_inverse(P: Tensor, L: Tensor, V: Tensor) -> Tensor:
    """$P^-1 = V diag(1 / L) V^H$, with 0 for $1 / l$ at $l = 0$.

    Args:
        L: an eigenvalue of the largest magnitude comes first.

    Returns:
        (*, n, n).

    Note:
        Where not differentiable: at singular $P$, where the derivative, too, acts only in the range of $P$.

    References:
        Higham, Functions of Matrices, section 3.1; Golub and Pereyra, SIAM J. Numer. Anal. 10 (1973) 413.
    """
    return (V * _reciprocal(L, L).unsqueeze(-2)) @ V.mH
