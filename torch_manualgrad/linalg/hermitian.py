"""Functions of a Hermitian matrix, from tables of divided differences at its eigenvalues.

For $A = V diag(l) V^H$, $F(A) = V diag(f(l)) V^H$. With $E~ = V^H E V$, its derivatives are

    first:   $V X V^H$,   $X_ij = f[l_i, l_j] E~_ij$   (Daleckii and Krein)
    $k$-th:  $V X V^H$,   $X_(i_0 i_k)$ is the sum over the orders of $E_1, ..., E_k$ and over $i_1, ..., i_(k-1)$ of
                         $f[l_(i_0), ..., l_(i_k)] (E~_1)_(i_0 i_1) (E~_2)_(i_1 i_2) ... (E~_k)_(i_(k-1) i_k)$

with divided differences $f[a, b] = (f(a) - f(b)) / (a - b)$, $f[a, a] = f'(a)$, and so on. Nothing here depends on the
choice of eigenvectors, and nothing is singular where eigenvalues repeat. One operator computes all of
these, for the directions stacked in $E$: its derivative in $A$ is the same operator with one more direction. It is a
symmetric form in its directions and its cotangent, so its vjp is the same operator too.

A divided difference over $k + 1$ nodes is computed from two over $k$ nodes, or from the Taylor series of $f$ at its middle
node, whichever has the smaller error estimate. Over two nodes, the named functions have closed forms.

References:
    Daleckii and Krein, AMS Translations 47 (1965) 1; Higham, Functions of Matrices (SIAM 2008), theorem 3.11, corollary
    3.12 and section 10.6; Bhatia, Matrix Analysis (1997), section V.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..derivatives.linalg.divided_differences import contract
from ..derivatives.linalg.smooth import hermitian, replaced, smooth, with_direction

__all__ = ["Tables", "divided_difference", "function_of_hermitian", "hermitian_function"]

# The eigenvalues, (*, n), in float64 -> the J and D of `hermitian_function`.
Tables = Callable[[Tensor], tuple[Tensor, Tensor]]


# -- divided differences --------------------------------------------------------------------------------------------


def divided_difference(at: Sequence[Tensor], L: Tensor, J: Tensor, D: Tensor | None = None) -> Tensor:
    """$f[l_a, l_b, ...]$ for index tensors $a <= b <= ...$ of one shape.

    Args:
        at: the indices of the nodes.
        L: the eigenvalues, ascending, (*, n).
        J: (*, K + 1, n): $f, f', f'' / 2, ..., f^(K) / K!$ at $L$.
        D: (*, n, n): $f[l_i, l_j]$, if known more accurately than from $J$; else None.

    Returns:
        The batch dims of $L$, followed by the shape of the indices.
    """
    order, last = len(at) - 1, J.shape[-2] - 1
    if order == 0:
        return J[..., 0, :][..., at[0]]
    if order == 1 and D is not None:
        return D[..., at[0], at[1]]
    left, right = divided_difference(at[:-1], L, J, D), divided_difference(at[1:], L, J, D)
    gap = L[..., at[-1]] - L[..., at[0]]
    apart = (right - left) / torch.where(gap == 0, 1, gap)

    # f[...] = sum over q of J_(k+q)(m) h_q(l - m), with h_q the complete homogeneous polynomial of degree q
    centre = order // 2
    middle = L[..., at[centre]]
    h = [torch.ones_like(gap), *[torch.zeros_like(gap)] * (last - order)]
    for i, node in enumerate(at):
        if i != centre:
            step = L[..., node] - middle
            for q in range(1, len(h)):
                h[q] = h[q] + step * h[q - 1]
    near = torch.zeros_like(gap)
    for q in reversed(range(len(h))):
        near = near + J[..., order + q, :][..., at[centre]] * h[q]

    # Compare the last term of the series with the rounding error of the quotient, both times the gap. The coefficient of
    # that term is taken at the outer nodes: at the middle one it may vanish by chance.
    ends = J[..., last, :].abs()
    cut = (ends[..., at[0]] + ends[..., at[-1]]) * gap ** (last - order) * math.comb(last, order)
    rounding = torch.finfo(L.dtype).eps * (left.abs() + right.abs())
    return torch.where(cut * gap <= rounding, near, apart)


# -- the operator ---------------------------------------------------------------------------------------------------


def _vjp(needed: dict[str, bool], inputs: Any, output: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, L, V, J, D, E = inputs
    found = {}
    if needed["A"]:
        found["A"] = hermitian_function(A, L, V, J, D, with_direction(E.mH, grad))
    if needed["E"] and (slots := range(E.shape[-3])):
        parts = [hermitian_function(A, L, V, J, D, replaced(E.mH, s, grad)) for s in slots]
        found["E"] = torch.stack(parts, -3)
    return found


def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    A, L, V, J, D, E = inputs
    found = None
    if tangents.A is not None:
        found = hermitian_function(A, L, V, J, D, with_direction(E, tangents.A))
    if tangents.E is not None:
        for s in range(E.shape[-3]):
            part = hermitian_function(A, L, V, J, D, replaced(E, s, tangents.E[..., s, :, :]))
            found = part if found is None else found + part
    return found


def _fake(A: Tensor, L: Tensor, V: Tensor, J: Tensor, D: Tensor, E: Tensor) -> Tensor:
    return V.new_empty(*torch.broadcast_shapes(V.shape[:-2], E.shape[:-3]), *V.shape[-2:])


def _of_eigenvalues(V: Tensor, f: Tensor) -> Tensor:
    """$V diag(f) V^H$; an infinite $f$ makes exactly those entries infinite that its eigenvectors contribute to."""
    infinite = f.isinf()
    if not infinite.any():
        return (V * f.unsqueeze(-2)) @ V.mH
    finite = (V * torch.where(infinite, 0, f).unsqueeze(-2)) @ V.mH
    parts = torch.view_as_real if V.is_complex() else lambda x: x
    signs = parts(((V * torch.where(infinite, f.sgn(), 0).unsqueeze(-2)) @ V.mH).contiguous())
    found = parts(finite.contiguous()) + torch.where(signs == 0, 0, signs * math.inf)
    return torch.view_as_complex(found) if V.is_complex() else found


@smooth(vjp=_vjp, jvp=_jvp, fake=_fake)
def hermitian_function(A: Tensor, L: Tensor, V: Tensor, J: Tensor, D: Tensor, E: Tensor) -> Tensor:
    """The $k$-th derivative of $F(A) = V f(diag L) V^H$ in the $k$ directions $E$; for $k = 0$, $F(A)$.

    It is differentiable in any order and mode.

    Args:
        A: Hermitian, (*, n, n). Its value is not read: $L$ and $V$ determine it.
        L: its eigenvalues, ascending, (*, n); a constant to every derivative.
        V: its eigenvectors, (*, n, n); constant.
        J: (*, K + 1, n), float64: $f^(q)(L) / q!$ for $q = 0, ..., K$; constant.
        D: (*, n, n), float64: $f[l_i, l_j]$; constant.
        E: (*, k, n, n): the directions, not necessarily Hermitian.

    Returns:
        (*, n, n).

    Raises:
        NotImplementedError: $k > K$: the derivative of $f$ is missing.

    Note:
        Where not differentiable: where $f$ is not.

    References:
        Higham, Functions of Matrices, corollary 3.12; Bhatia, Matrix Analysis, theorem V.3.3.
    """
    order, known = E.shape[-3], J.shape[-2] - 1
    if order > known:
        raise NotImplementedError(
            f"the derivative of order {order} of a matrix function needs the derivative of order {order} of the scalar "
            f"function, and {known} are known: pass more derivatives to funm_hermitian"
        )
    if order == 0:
        return _of_eigenvalues(V, J[..., 0, :].to(L.dtype))
    rotated = V.mH.unsqueeze(-3) @ E @ V.unsqueeze(-3)
    if order == 1:
        X = D.to(L.dtype) * rotated[..., 0, :, :]
    else:
        nodes = L.to(J.dtype)
        X = contract(lambda at: divided_difference(at, nodes, J, D), L.numel(), rotated)
    return V @ X @ V.mH


def function_of_hermitian(A: Tensor, tables: Tables) -> Tensor:
    """$F((A + A^H) / 2)$, with exact derivatives."""
    A = hermitian(A)
    L, V = torch.linalg.eigh(A.detach())
    J, D = tables(L.double())
    return hermitian_function(A, L, V, J, D, A.new_empty(*A.shape[:-2], 0, *A.shape[-2:]))
