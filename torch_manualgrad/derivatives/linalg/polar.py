"""The polar decomposition, $A = U H$ with $U^H U = I$ and $H$ Hermitian positive semidefinite: linalg_polar.

With $Z = U^H dA$ and the skew-Hermitian solution $X$ of $H X + X H = Z - Z^H$,

    dU = U X + (dA - U Z) H^-1,     dH = Z - X H,

and with $G = (gH + gH^H) / 2$ and the skew-Hermitian solution $Y$ of $H Y + Y H = M - M^H$ for $M = U^H gU - G H$,

    gA = U (Y + G) + (gU - U U^H gU) H^-1.

Both divide by sums of singular values only (see lyapunov.py), so they are exact where singular values repeat. For a square
$A$ the last terms are 0.

Args:
    U: as the decomposition returned it, (*, m, n).
    H: as the decomposition returned it, (*, n, n).
    A: (*, m, n), $m >= n$, real or complex. Its value is not read.

Note:
    Where not differentiable: where $A$ does not have full rank. The undetermined part of the derivative is 0. A square real
    $A$ may have rank $n - 1$: the derivative of $U$ is then that of the chosen branch.

References:
    Kenney and Laub, SIAM J. Matrix Anal. Appl. 12 (1991) 488, theorem 2.2; Higham, Functions of Matrices (SIAM 2008),
    chapter 8; ATen linalg_polar_backward and linalg_polar_jvp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .common import sym
from .lyapunov import eigenpairs, hermitian_inverse, skew_lyapunov


def _eigenpairs(H: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of $H$, the largest first, and its eigenvectors, without history."""
    L, V = eigenpairs(H)
    return L.flip(-1), V.flip(-1)


def _beside(E: Tensor, U: Tensor, H: Tensor, L: Tensor, V: Tensor) -> Tensor:
    """$(E - U U^H E) H^-1$, the part of a change whose columns are orthogonal to those of $U$; 0 for a square $U$."""
    return (E - U @ (U.mH @ E)) @ hermitian_inverse(H, L, V)


@formula
def linalg_polar_backward(grad_U: Tensor | None, grad_H: Tensor | None, A: Tensor, U: Tensor, H: Tensor) -> Tensor:
    """Cotangent of $A$, given those of its polar factors: $gA$ of the module's docstring.

    Args:
        grad_U: cotangent of $U$, (*, m, n); None for zero.
        grad_H: cotangent of $H$, (*, n, n); None for zero.

    Returns:
        (*, m, n).
    """
    if grad_U is None and grad_H is None:
        return torch.zeros_like(A)
    L, V = _eigenpairs(H)
    G = None if grad_H is None else 0.5 * sym(grad_H)
    M = None if grad_U is None else U.mH @ grad_U
    if G is not None:
        M = -(G @ H) if M is None else M - G @ H
    assert M is not None
    inner = skew_lyapunov(H, L, V, 2 * M)
    found = U @ (inner if G is None else inner + G)
    if grad_U is None or U.shape[-2] == U.shape[-1]:
        return found
    return found + _beside(grad_U, U, H, L, V)


@formula
def linalg_polar_jvp(dA: Tensor, A: Tensor, U: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of the polar factors of $A$: $dU$ and $dH$ of the module's docstring.

    Args:
        dA: tangent of $A$, (*, m, n).

    Returns:
        Tangents of the shapes of ``U`` and ``H``; the second is Hermitian.
    """
    L, V = _eigenpairs(H)
    Z = U.mH @ dA
    X = skew_lyapunov(H, L, V, 2 * Z)
    U_t = U @ X
    if U.shape[-2] != U.shape[-1]:
        U_t = U_t + _beside(dA, U, H, L, V)
    return U_t, 0.5 * sym(Z - X @ H)


rule(
    "aten::linalg_polar",
    vjp={"A": linalg_polar_backward},
    jvp={("U", "H"): linalg_polar_jvp.bind(dA="A_t")},
    since="2.15",
    improves="values",
    source="ATen linalg_polar_backward, linalg_polar_jvp; Kenney and Laub, 1991",
)
