"""The adjugate $adj(A) = det(A) A^-1$, a polynomial in the entries of $A$ that exists for every $A$.

Three ways to compute it: `small_adjugate` by sums of products, up to order 4; `adjugate` through singular values,
differentiable in every mode; `adjugate_from_lu` from LU factors, the fastest, which is not differentiable.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .common import eye_like, of_finite

# The number of smallest singular values that may vanish in `adjugate`, which does not divide by them. A block of 4 is
# right for second derivatives at rank n - 2 and for fourth derivatives at rank n - 4.
_BLOCK = 4


def _minors(n: int) -> tuple[list[list[list[int]]], list[int], list[int]]:
    """Leibniz's formula for the cofactors of a matrix of order $n$, in row-major order.

    Returns:
        For each cofactor and each permutation the flat indices of the factors; the sign of each permutation; the sign
        of each cofactor.
    """
    permutations = list(itertools.permutations(range(n - 1)))
    signs = [(-1) ** sum(p[i] > p[j] for i, j in itertools.combinations(range(n - 1), 2)) for p in permutations]
    places, own = [], []
    for i, j in itertools.product(range(n), repeat=2):
        rows = [k for k in range(n) if k != i]
        columns = [k for k in range(n) if k != j]
        places.append([[row * n + columns[k] for row, k in zip(rows, p)] for p in permutations])
        own.append((-1) ** (i + j))
    return places, signs, own


def small_adjugate(S: Tensor) -> Tensor:
    """$adj(S)$ up to order _BLOCK, by sums of products, which are smooth and accurate at any rank."""
    n = S.shape[-1]
    places, *signs = _minors(n)
    factors = S.flatten(-2)[..., torch.tensor(places, dtype=torch.long, device="cpu").to(S.device)].unbind(-1)
    products = math.prod(factors[1:], start=factors[0]) if factors else S.new_ones(*S.shape[:-2], n * n, 1)
    # moved afterwards: torch.func cannot make a tensor on "meta" from numbers
    of_products, of_cofactors = (torch.tensor(x, dtype=S.dtype, device="cpu").to(S.device) for x in signs)
    cofactors = (products * of_products).sum(-1) * of_cofactors
    return cofactors.unflatten(-1, (n, n)).mT


def adjugate(A: Tensor) -> Tensor:
    """$adj(A)$, differentiable in every mode: to every order at rank $n - 4$ and above, to the third order below that.

    Take the singular value decomposition $A0 = U diag(s) V^H$ of the value of $A$, as constants, and $M = U^H A V$, so
    that $adj(A) = det(U V^H) V adj(M) U^H$. $M$ has the value $diag(s)$ and the derivatives of $A$. Split off the last
    rows and columns, those of the smallest $s$: with $M = [[M1, B], [C, D]]$, $X = M1^-1 B$, $Y = C M1^-1$ and
    $S = D - C X$,

        det M = det M1 det S,        adj M = det M1 ( det S [[M1^-1, 0], [0, 0]] + [[-X], [I]] adj(S) [-Y, I] ).

    Only $M1$ is inverted. Where its value $diag(s1)$ is singular, the derivatives of det up to the fourth are zero. There
    the result and its derivatives up to the third are zero, and higher ones are nan.

    Args:
        A: (*, n, n), real or complex, $n >= 1$.

    Returns:
        (*, n, n); nan for matrices that are not finite.

    References:
        G. W. Stewart, On the adjugate matrix, 1998, doi:10.1016/S0024-3795(98)10098-8.
    """
    return of_finite(_by_singular_values, A)


def _by_singular_values(A: Tensor) -> Tensor:
    n = A.shape[-1]
    A0 = A.detach()
    U, s, Vh = torch.linalg.svd(A0)
    change = A - A0  # its value is zero
    E = U.mH @ change @ Vh.mH
    phase = torch.linalg.det((U @ Vh).detach())[..., None, None]
    if n <= _BLOCK:
        return phase * (Vh.mH @ small_adjugate(E + torch.diag_embed(s)) @ U.mH)

    k = n - _BLOCK
    top, low = s[..., :k], s[..., k:]
    lost = top[..., -1:] == 0
    top = torch.where(lost, 1, top)
    # M1 = diag(top) N, where N has the value of the identity: the diagonal of its triangular factor gives log det N
    rows = E[..., :k, :] / top.unsqueeze(-1)
    N = eye_like(rows[..., :k]) + rows[..., :k]
    det_N = torch.linalg.lu_factor_ex(N)[0].diagonal(dim1=-2, dim2=-1).log().sum(-1).exp()
    N_inverse = torch.linalg.inv_ex(N)[0]
    X = N_inverse @ rows[..., k:]
    M1_inverse = N_inverse / top.unsqueeze(-2)
    Y = E[..., k:, :k] @ M1_inverse

    S = torch.diag_embed(low) + E[..., k:, k:] - E[..., k:, :k] @ X
    adj_S = small_adjugate(S)
    det_S = (S[..., 0, :] * adj_S[..., :, 0]).sum(-1)[..., None, None]
    eye = eye_like(S).expand(S.shape)
    left, right = torch.cat((-X, eye), -2), torch.cat((-Y, eye), -1)
    adj_M = left @ adj_S @ right + torch.nn.functional.pad(det_S * M1_inverse, (0, _BLOCK, 0, _BLOCK))
    scale = phase * (top.prod(-1) * det_N)[..., None, None]
    # |A - A0|^7: zero, with derivatives that are zero up to the third and then nan
    size = (change.conj() * change).real.sum((-2, -1), keepdim=True)
    lost = lost.unsqueeze(-1)
    zero = torch.where(lost, size, 1).pow(3.5)
    return torch.where(lost, zero.to(A.dtype), scale * (Vh.mH @ adj_M @ U.mH))


def adjugate_from_lu(LU: Tensor, pivots: Tensor) -> Tensor:
    """$adj(P L U) = det(P) adj(U) L^-1 P^T$, exact for any number of zeros among the pivots $u_i$.

    First, $U$ is divided by the geometric mean of the nonzero pivots. The product of all of them may leave the range of the
    dtype although the adjugate, which has products of $n - 1$ of them, does not. Then each zero is replaced by $d$, and
    $U = D E W E^-1$, where $D$ holds the pivots and $E_jj = d^$-(zeros before $j$). As $d -> 0$, $W$ stays finite, and only
    the entries $W_ij$ with no zero pivot after $i$ and before $j$ remain. In $adj(U) = det(D) E W^-1 E^-1 D^-1$, the powers
    of $d$ leave only the rows up to the first zero pivot and the columns from the last zero pivot on.

    Args:
        LU: the packed factors, (*, n, n).
        pivots: (*, n), int32.

    Returns:
        (*, n, n).
    """
    pivot = LU.diagonal(dim1=-2, dim2=-1)
    zero = pivot == 0
    mean = torch.where(zero, 1, pivot).abs().log().mean(-1, keepdim=True).exp()
    pivot = pivot / mean
    after = zero.cumsum(-1)  # zeros up to here
    before = after - zero.to(after.dtype)
    P = torch.lu_unpack(LU, pivots, unpack_data=False)[0]
    swaps = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)).sum(-1)
    det = torch.where(zero, 1, pivot).prod(-1) * (1 - 2 * (swaps % 2))

    U = LU / mean.unsqueeze(-1)
    U = torch.where(before.unsqueeze(-2) <= after.unsqueeze(-1), U, 0) + torch.diag_embed(zero.to(LU.dtype))
    X = torch.linalg.solve_triangular(LU, P.mT, upper=False, unitriangular=True) * det[..., None, None]
    X = torch.where((after == after[..., -1:]).unsqueeze(-1), X, 0)
    X = torch.linalg.solve_triangular(U, X, upper=True) * mean.pow(LU.shape[-1] - 1).unsqueeze(-1)
    return torch.where((before == 0).unsqueeze(-1), X, 0)
