"""The derivatives of QR where the rank is full, by shorter formulas than in qr.py, and how to tell where it is.

With full rank Q and R do for A, and W - K does not need all of K.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .common import phi, skew, sym

# From which order on products with triangles go by blocks, by measurement.
_BLOCK = 128


def leading(A: Tensor) -> int:
    """How many columns of A determine Q."""
    m, n = A.shape[-2:]
    return min(m, n) if m > n or A.is_complex() else max(m - 1, 0)


def vanishing(order: int, R: Tensor) -> Tensor:
    """Which pivots of R, a leading part, are zero to rounding, beside a sum of moduli: one of squares may overflow.

    Args:
        order: the larger dimension of A.
    """
    rounding = order * torch.finfo(R.dtype).eps
    return R.diagonal(dim1=-2, dim2=-1).abs() <= (R.abs() * rounding).sum(-2)


def where_deficient(
    results: tuple[Tensor, ...],
    A: Tensor,
    R: Tensor,
    again: Callable[..., tuple[Tensor, ...]],
    *tensors: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """The results, with those of ``again`` for matrices in which a pivot vanishes; None where these are all of them."""
    c = leading(A)
    deficient = vanishing(max(A.shape[-2:]), R[..., :c, :c]).any(-1)
    if not deficient.any():
        return results
    if deficient.all():
        return None
    for result, right in zip(results, again(*[x if x is None else x[deficient] for x in tensors])):
        result[deficient] = right
    return results


def _subtract_outer(M: Tensor, S: Tensor, R: Tensor) -> None:
    """M -= S R^H for the upper triangles S and R, (*, m, n), in place."""
    m, n = R.shape[-2:]
    step = max(_BLOCK, -(-m // 4))
    for begin in range(0, m, step):
        end = min(begin + step, m)
        columns = slice(begin, end if end < m else n)
        M[..., :end, :end].sub_(S[..., :end, columns] @ R[..., :end, columns].mH)


def _divide(W: Tensor, R: Tensor) -> None:
    """W := W R^-H, for W with nothing above its diagonal, in place."""
    n = R.shape[-1]
    if n < 2 * _BLOCK:
        W.copy_(solve_triangular(R.mH, W, upper=False, left=False))
        return
    half = n // 2
    lower = W[..., half:, half:]
    _divide(lower, R[..., half:, half:])
    W[..., half:, :half].sub_(lower @ R[..., :half, half:].mH)
    _divide(W[..., :half], R[..., :half, :half])


def full_rank_backward(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int) -> Tensor:
    """`linalg_qr_backward` with a cotangent: M = Q^H gQ - gR R^H is smaller than K, and has the same K - K^H.

    A matrix without full rank gets anything.

    Args:
        c: how many columns of A determine Q.
    """
    M = Q.new_zeros(*Q.shape[:-2], Q.shape[-1], Q.shape[-1]) if grad_Q is None else Q.mH @ grad_Q
    upper = torch.zeros_like(R) if grad_R is None else grad_R.triu()
    if grad_R is not None:
        _subtract_outer(M, upper, R)
    if Q.shape[-1] < Q.shape[-2]:
        # G - Q (K - W) = gQ - Q (M - W), and M - W is Hermitian, with the upper triangle of M
        G = Q @ sym(phi(M.mH))
        return solve_triangular(R.mH, -G if grad_Q is None else grad_Q - G, upper=False, left=False)
    # Q is square, and G - Q K is zero
    W = phi(skew(M)) if M.is_complex() else skew(M).tril(-1)
    inner = W[..., :c]
    _divide(inner, R[..., :c, :c])
    upper[..., :c].add_(inner)
    return (upper.mT @ Q.mT).mT


def full_rank_jvp(A_t: Tensor, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """With full rank Q and R do for A: dR = (N - Omega) R, or Q^H dA - Omega R if Q is square."""
    m, p = Q.shape[-2], min(A_t.shape[-2:])
    R_1 = R[..., :p, :p]
    if Q.shape[-1] < m:
        Y = solve_triangular(R_1, A_t, upper=True, left=False)
        upper = phi(sym(Q.mH @ Y)).mH
        return (Y - Q @ upper).contiguous(), upper @ R
    QhA_t = Q.mH @ A_t
    N = solve_triangular(R_1, QhA_t[..., :p], upper=True, left=False)
    omega = skew(phi(pad(N, (0, m - p))) if N.is_complex() else pad(N, (0, m - p)).tril(-1))
    return Q @ omega, (QhA_t - omega @ R).triu()
