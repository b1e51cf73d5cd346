"""Determinants: _linalg_det and _linalg_slogdet, under det, logdet and slogdet.

With the adjugate adj(A) = det(A) A^-1, a polynomial in A that exists for every A, and the derivative of log det,

    d det(A) = tr(adj(A) dA),        vjp: g adj(A)^H;
    d log|det(A)| + i d arg det(A) = tr(A^-1 dA),        vjp: h A^-H, h = g_logabsdet - i Im(conj(g_sign) sign).

The forward hands out its LU factorisation as constants: it serves the first order only. What is differentiated again is
a function of A alone. For the adjugate that is `adjugate`, below, which never divides by what may be zero.

Non-smooth points. det has none. log|det| is -inf at a singular matrix, and has no derivative there: the gradient and
the tangents of that matrix are nan, those of the others in the batch are as ever, and nothing is raised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule

from .common import eye_like, fused, random, random_conditioned

# How many of the smallest singular values `adjugate` lets vanish: with a block of this size it divides by no function
# of them. A block of 4 is right for second derivatives at rank n - 2 and fourth ones at rank n - 4.
_BLOCK = 4


def _minors(size: int) -> tuple[list[list[list[int]]], list[int], list[int]]:
    """Leibniz's formula for the cofactors of a size x size matrix, row by row.

    Returns:
        for each cofactor and each permutation the flat places of the factors; each permutation's sign; each cofactor's.
    """
    permutations = list(itertools.permutations(range(size - 1)))
    signs = [(-1) ** sum(p[i] > p[j] for i, j in itertools.combinations(range(size - 1), 2)) for p in permutations]
    places, own = [], []
    for i, j in itertools.product(range(size), repeat=2):
        rows = [k for k in range(size) if k != i]
        columns = [k for k in range(size) if k != j]
        places.append([[row * size + columns[k] for row, k in zip(rows, p)] for p in permutations])
        own.append((-1) ** (i + j))
    return places, signs, own


def small_adjugate(S: Tensor) -> Tensor:
    """adj(S) for at most _BLOCK rows: sums of products, smooth and accurate whatever vanishes."""
    size = S.shape[-1]
    places, *signs = _minors(size)
    factors = S.flatten(-2)[..., torch.tensor(places, dtype=torch.long).to(S.device)].unbind(-1)
    products = math.prod(factors[1:], start=factors[0]) if factors else S.new_ones(*S.shape[:-2], size * size, 1)
    # moved after it is made: torch.func refuses to make a tensor on "meta" from numbers
    of_products, of_cofactors = (torch.tensor(x, dtype=S.dtype).to(S.device) for x in signs)
    cofactors = (products * of_products).sum(-1) * of_cofactors
    return cofactors.unflatten(-1, (size, size)).mT


def adjugate(A: Tensor) -> Tensor:
    """adj(A), differentiable in every mode: to every order at rank n - 4 and above, to the third below that.

    Take the singular value decomposition A0 = U diag(s) V^H of the value of A, as constants, and M = U^H A V, so that
    adj(A) = det(U V^H) V adj(M) U^H. M has the value diag(s) and the derivatives of A. Split off the last rows and
    columns, those of the smallest s: with M = [[M1, B], [C, D]], X = M1^-1 B, Y = C M1^-1 and S = D - C X,

        det M = det M1 det S,        adj M = det M1 ( det S [[M1^-1, 0], [0, 0]] + [[-X], [I]] adj(S) [-Y, I] ).

    Only M1 is inverted. Where its value diag(s1) is singular the derivatives of det up to the fourth are zero; so is
    what is returned, with a nan for each order after that.
    """
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
    # M1 = diag(top) N, and N is the identity with derivatives: of log det N, triangular factors give the diagonal
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
    # |A - A0|^7: zero with its derivatives up to the third, and nan after
    size = (change.conj() * change).real.sum((-2, -1), keepdim=True)
    lost = lost.unsqueeze(-1)
    zero = torch.where(lost, size, 1).pow(3.5)
    return torch.where(lost, zero.to(A.dtype), scale * (Vh.mH @ adj_M @ U.mH))


def _is_of_transpose(A: Tensor) -> bool:
    """Whether the forward factorised A^T and not A."""
    return A.is_contiguous() and not A.is_complex()


def _laid_out(X: Tensor, A: Tensor) -> Tensor:
    """X as `_solve` lays it out: by rows where the forward factorised A^T, by columns elsewhere."""
    return X.contiguous() if _is_of_transpose(A) else X.mT.contiguous().mT


def _without_zeros(x: Tensor) -> bool:
    """Whether no entry of x is zero, where asking does not stop the device; False leaves it open."""
    return x.is_cpu and bool(x.all())


def _underflowed(det: Tensor, LU: Tensor) -> bool:
    """Whether a determinant is zero of which no pivot is, where asking does not stop the device."""
    return det.is_cpu and not det.all() and bool(((det == 0) & (LU.diagonal(dim1=-2, dim2=-1) != 0).all(-1)).any())


def _solve(h: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """h A^-H by the triangular factors, h ``(*)``: from the side on which LAPACK solves with transposed factors."""
    of_A = not _is_of_transpose(A)
    right = torch.diag_embed(h.unsqueeze(-1).expand(pivots.shape))
    return torch.linalg.lu_solve(LU, pivots, right, left=of_A, adjoint=of_A)


def _adjugate_from_lu(LU: Tensor, pivots: Tensor) -> Tensor:
    """adj(P L U) = det(P) adj(U) L^-1 P^T, exact for any number of zeros among the pivots u_i.

    First divide U by the geometric mean of the pivots that are not zero: their product may leave the range of the dtype
    where the adjugate, of n - 1 of them, does not. Put d for each zero, and scale: U = D E W E^-1 with D the pivots and E_jj = d^-(zeros before j). Then W stays finite
    as d -> 0; what remains of it is W_ij with no zero pivot after i and before j. Of adj(U) = det(D) E W^-1 E^-1 D^-1
    the powers of d leave the rows up to the first zero pivot and the columns from the last on.
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


@formula(kernel=("default",))
def linalg_det_backward(grad: Tensor, det: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """Cotangent of A for that of its determinant: grad adj(A)^H, also where A is singular.

    Args:
        grad: cotangent of the determinant, ``(*)``.
        det: the determinant, ``(*)``. LU, pivots: its factorisation, of A^T if A is real and contiguous, else of A. All
            three are constants of the first order: what is differentiated is adj(A).
        A: ``(*, n, n)``, real or complex; n may be 0.
    Returns:
        ``(*, n, n)``, by rows if A is real and contiguous, else by columns.
    Where not differentiable: none. At rank n - 4 and above every derivative is right; below, those of det up to the fourth
        (they are zero), and what comes after is nan.
    Source: ATen linalg_det_backward; the adjugate as in G. W. Stewart, On the adjugate matrix, 1998.
    """
    if A.numel() == 0:
        return _laid_out(torch.zeros_like(A), A)
    return _laid_out(grad[..., None, None] * adjugate(A).mH, A)


@formula(kernel=("cpu", "cuda"))
def det_pullback(grad: Tensor, det: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """Cotangent of B^T, B = P L U, for that of its determinant: grad conj(adj(B)); a constant of the first order.

    Args:
        grad, det: the cotangent and the determinant, (*).
        LU, pivots: the factorisation, (*, n, n) and (*, n); the kernel takes the sizes in csrc/linalg/det.h.
    Returns:
        (*, n, n), by rows.
    Raises: RuntimeError: shapes, dtypes or devices that do not fit each other, or a larger n.
    Where not differentiable: none. Source: linalg_det_backward, of which it is the kernel.
    """
    return (grad[..., None, None] * _adjugate_from_lu(LU, pivots).conj()).contiguous()


@linalg_det_backward.impl("default")
def _det_backward_kernel(grad: Tensor, det: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    if A.numel() == 0:
        return _laid_out(torch.zeros_like(A), A)
    underflowed = _underflowed(det, LU)
    if not underflowed and fused(A.shape[-1], A, in_cache=100):
        gradient = det_pullback(grad, det, LU, pivots)
    elif not underflowed and _without_zeros(LU.diagonal(dim1=-2, dim2=-1)):
        return _solve(grad * det.conj(), A, LU, pivots)
    else:
        gradient = det_pullback.reference(grad, det, LU, pivots).contiguous()
    return gradient if _is_of_transpose(A) else gradient.mT


@formula
def linalg_det_jvp(dA: Tensor, det: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """Tangent of the determinant: tr(adj(A) dA).

    Args:
        dA: tangent of A, ``(*, n, n)``.
        det, A, LU, pivots: as linalg_det_backward.
    Returns:
        ``(*)``.
    Where not differentiable: none; see linalg_det_backward. Source: ATen linalg_det_jvp.
    """
    adj_H = linalg_det_backward(torch.ones_like(det), det, A, LU, pivots)
    return (adj_H.conj() * dA).sum((-2, -1))


def _slogdet_factor(grad_sign: Tensor | None, grad_logabsdet: Tensor | None, A: Tensor, sign: Tensor) -> Tensor:
    """h of the module's docstring."""
    h = torch.zeros_like(sign) if grad_logabsdet is None else grad_logabsdet.to(A.dtype)
    if A.is_complex() and grad_sign is not None:
        h = h - 1j * (grad_sign.conj() * sign).imag
    return h


@formula(kernel=("default",))
def slogdet_backward(
    grad_sign: Tensor | None,
    grad_logabsdet: Tensor | None,
    A: Tensor,
    sign: Tensor,
    LU: Tensor,
    pivots: Tensor,
) -> Tensor:
    """Cotangent of A for those of sign and log|det|: (grad_logabsdet - i Im(conj(grad_sign) sign)) A^-H.

    Args:
        grad_sign: cotangent of the sign, ``(*)``, or None; without effect for real A.
        grad_logabsdet: cotangent of log|det|, real, ``(*)``, or None.
        A: ``(*, n, n)``, real or complex; n may be 0.
        sign: det / |det|, ``(*)``; 0 where A is singular.
        LU, pivots: as linalg_det_backward.
    Returns:
        ``(*, n, n)``, by rows if A is real and contiguous, else by columns.
    Where not differentiable: where A is singular, nan in that matrix only.
    Source: ATen slogdet_backward.
    """
    if A.numel() == 0:
        return _laid_out(torch.zeros_like(A), A)
    h = _slogdet_factor(grad_sign, grad_logabsdet, A, sign)[..., None, None]
    singular = (sign == 0)[..., None, None]
    inverse = torch.linalg.inv_ex(torch.where(singular, eye_like(A), A))[0]
    return _laid_out(torch.where(singular, math.nan, h * inverse.mH), A)


@formula(kernel=("cpu", "cuda"))
def slogdet_pullback(h: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """h conj(B^-1), the cotangent of B^T for B = P L U, by `slogdet_backward`; a constant of the first order.

    Args:
        h: see the module's docstring, (*), in the dtype of LU.
        LU, pivots: the factorisation, (*, n, n) and (*, n); the kernel takes the sizes in csrc/linalg/det.h.
    Returns:
        (*, n, n), by rows.
    Raises: RuntimeError: shapes, dtypes or devices that do not fit each other, or a larger n.
    Where not differentiable: nan where a pivot is zero. Source: slogdet_backward, of which it is the kernel.
    """
    singular = (LU.diagonal(dim1=-2, dim2=-1) == 0).any(-1)[..., None, None]
    right = torch.diag_embed(h.conj().unsqueeze(-1).expand(pivots.shape))
    return torch.linalg.lu_solve(LU, pivots, right).conj().masked_fill(singular, math.nan)


@slogdet_backward.impl("default")
def _slogdet_backward_kernel(
    grad_sign: Tensor | None,
    grad_logabsdet: Tensor | None,
    A: Tensor,
    sign: Tensor,
    LU: Tensor,
    pivots: Tensor,
) -> Tensor:
    if A.numel() == 0:
        return _laid_out(torch.zeros_like(A), A)
    h = _slogdet_factor(grad_sign, grad_logabsdet, A, sign)
    if fused(A.shape[-1], A, in_cache=100):
        gradient = slogdet_pullback(h, LU, pivots)
        return gradient if _is_of_transpose(A) else gradient.mT
    result = _solve(h, A, LU, pivots)
    return result if _without_zeros(sign) else result.masked_fill_((sign == 0)[..., None, None], math.nan)


@formula
def slogdet_jvp(dA: Tensor, A: Tensor, sign: Tensor, LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of sign and log|det|: with r = tr(A^-1 dA), i Im(r) sign and Re(r).

    Args:
        dA: tangent of A, ``(*, n, n)``.
        A, sign, LU, pivots: as slogdet_backward.
    Returns:
        the two tangents, ``(*)``; that of a real sign is zero.
    Where not differentiable: nan where A is singular. Source: ATen slogdet_jvp.
    """
    ones = torch.ones_like(sign.real if sign.is_complex() else sign)
    rate = (slogdet_backward(None, ones, A, sign, LU, pivots).conj() * dA).sum((-2, -1))
    if not A.is_complex():
        return torch.zeros_like(sign), rate
    return 1j * rate.imag * sign, rate.real


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield Sample(random_conditioned(3, 3, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, 4, dtype=dtype, device=device).mT)
    yield Sample(random_conditioned(2, 2, 2, dtype=dtype, device=device))
    yield Sample(random_conditioned(6, 6, dtype=dtype, device=device, least=0.5))
    yield Sample(random(1, 1, dtype=dtype, device=device))
    yield Sample(random(2, 0, 0, dtype=dtype, device=device))


def _det_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from _samples(dtype, device)
    left, right = random(4, 4, dtype=dtype, device=device), random(4, 4, dtype=dtype, device=device, seed=1)
    yield Sample(torch.stack([left[:, :rank] @ right[:rank] for rank in (4, 3, 2)]))
    nilpotent = torch.ones(6, 6, dtype=dtype, device=device).triu(1)
    yield Sample(torch.stack([nilpotent, random_conditioned(6, 6, dtype=dtype, device=device)]))


rule(
    "aten::_linalg_det",
    vjp={
        "A": lambda grad_result, result, A, LU, pivots: linalg_det_backward(grad_result, result, A, LU, pivots),
    },
    jvp={"result": lambda A_p, A_t, result, LU, pivots: linalg_det_jvp(A_t, result, A_p, LU, pivots)},
    not_differentiable=("LU", "pivots"),
    improves="values",
    source="ATen linalg_det_backward, linalg_det_jvp",
    samples=_det_samples,
    probe=torch.linalg.det,
)
rule(
    "aten::_linalg_slogdet",
    vjp={
        "A": lambda grad_sign, grad_logabsdet, A, sign, LU, pivots: (
            None
            if grad_logabsdet is None and not A.is_complex()
            else slogdet_backward(grad_sign, grad_logabsdet, A, sign, LU, pivots)
        )
    },
    jvp={
        ("sign", "logabsdet"): lambda A_p, A_t, sign, LU, pivots: slogdet_jvp(A_t, A_p, sign, LU, pivots),
    },
    not_differentiable=("LU", "pivots"),
    improves={"values": "2.15"},
    source="ATen slogdet_backward, slogdet_jvp",
    samples=_samples,
    probe=torch.linalg.slogdet,
)
