"""The singular value decomposition A = U S V^H, thin or full.

With P = U^H dA V, its Hermitian part h = (P + P^H)/2 and anti-Hermitian part w = (P - P^H)/2, and the quotients by
differences and sums of singular values taken entry by entry,

    dS = Re diag P,    dU = U (h / (s_j - s_i) + w / (s_j + s_i)),    dV = V (h / (s_j - s_i) - w / (s_j + s_i)),

to which (I - U U^H) dA V S^-1 is added for dU and (I - V V^H) dA^H U S^-1 for dV. The adjoint, with
a = U^H gU - gU^H U and b = V^H gV - gV^H V:

    gA = U [(a + b) / (2 (s_j - s_i)) + (a - b) / (2 (s_j + s_i)) + diag gS] V^H
         + (I - U U^H) gU S^-1 V^H + U S^-1 gV^H (I - V V^H).

Only the first quotient is singular where singular values meet, only the others where they vanish: see degeneracy.py.
The common phase of a pair of complex vectors is left unchanged. The further columns U2 of a full U span what U leaves;
their derivative is taken orthogonal to their span: dU2 = -U dU^H U2, right for every loss of U2 U2^H, and likewise V2;
a loss that depends on the choice of their basis is reported.

Sources: Townsend, Differentiating the singular value decomposition (2016); Wan and Zhang, arXiv:1909.02659, for
complex matrices; ATen svd_backward and linalg_svd_jvp, whose single denominator s_j^2 - s_i^2 is split here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule

from .common import random_conditioned, skew, sym
from .degeneracy import Resolved, Scale, Tolerances, check_gauge, depends_on_basis, report

WHAT = "derivative of the singular value decomposition"


def _left_columns(gU: Tensor | None, U: Tensor, k: int) -> tuple[Tensor | None, Tensor]:
    """Cotangent and value of the first k columns; that of the others acts through these."""
    if U.shape[-1] == k:
        return gU, U
    thin, rest = U[..., :k], U[..., k:]
    if gU is None:
        return None, thin
    return gU[..., :k] - rest @ (gU[..., k:].mH @ thin), thin


def _upper_rows(gVh: Tensor | None, Vh: Tensor, k: int) -> tuple[Tensor | None, Tensor]:
    """The same for the rows of V^H."""
    if Vh.shape[-2] == k:
        return gVh, Vh
    thin, rest = Vh[..., :k, :], Vh[..., k:, :]
    if gVh is None:
        return None, thin
    return gVh[..., :k, :] - (thin @ gVh[..., k:, :].mH) @ rest, thin


@formula(kernel=("cpu", "cuda"))
def svd_pullback(
    gU: Tensor | None,
    gS: Tensor | None,
    gVh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None,
    atol: float,
    broadening: float,
) -> tuple[Tensor, Tensor]:
    """`svd_backward` of thin factors; says what it doubts in place of warning.

    Args:
        gU, gS, gVh: cotangents, of the shapes of U, S, Vh; None for zero.
        U, S, Vh: (*, m, k), (*, k), (*, k, n) with k = min(m, n).
        rtol, atol, broadening: see `Degeneracy`.
    Returns:
        The cotangent of A, (*, m, n), and whether the loss depends on the choice of basis anywhere: a 0-dim bool.
    Raises: RuntimeError: shapes, dtypes or devices that do not fit each other.
    Where not differentiable: as svd_backward. Source: the module's docstring.
    """
    k = S.shape[-1]
    certain = torch.zeros((), dtype=torch.bool, device=U.device)
    if 0 in (U.numel(), Vh.numel()) or (gU is None and gS is None and gVh is None):
        return U.new_zeros((*U.shape[:-1], Vh.shape[-1])), certain
    if gU is None and gVh is None:
        assert gS is not None
        return (U * gS.unsqueeze(-2)) @ Vh, certain
    gV, V = None if gVh is None else gVh.mH, Vh.mH
    quotients = Resolved(Scale.of(S, max(U.shape[-2], V.shape[-2]), rtol, atol, broadening), gU, gV)
    X = None if gU is None else U.mH @ gU
    Y = None if gV is None else Vh @ gV
    zero = torch.zeros_like(quotients.pair_noise)
    a, c = (zero, zero) if X is None else (skew(X), sym(X))
    b, d = (zero, zero) if Y is None else (skew(Y), sym(Y))
    inner = quotients.by_differences(0.5 * (a + b), S, 0.25 * (c + d), gS) + quotients.by_sums(0.5 * (a - b), S)
    if gS is not None:
        inner = inner + torch.diag_embed(gS)
    left = U @ inner
    if gU is not None and X is not None and U.shape[-2] > k:
        left = left + quotients.by_values(gU - U @ X, S, gU)
    gA = left @ Vh
    if gV is not None and Y is not None and V.shape[-2] > k:
        gA = gA + U @ quotients.by_values(gV - V @ Y, S, gV).mH
    return gA, quotients.doubts


def _svd_backward(
    pullback: Callable[..., tuple[Tensor, Tensor]],
    gU: Tensor | None,
    gS: Tensor | None,
    gVh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    tolerances: Tolerances,
    gauge: str,
) -> tuple[Tensor, Tensor]:
    """`svd_pullback` of thin or full factors."""
    check_gauge(gauge)
    k = S.shape[-1]
    turned = []
    if gU is not None and U.shape[-1] > k:
        turned.append(depends_on_basis(U[..., k:], gU[..., k:]))
    if gVh is not None and Vh.shape[-2] > k:
        turned.append(depends_on_basis(Vh[..., k:, :].mH, gVh[..., k:, :].mH))
    gU, U = _left_columns(gU, U, k)
    gVh, Vh = _upper_rows(gVh, Vh, k)
    gA, doubts = pullback(gU, gS, gVh, U, S, Vh, *tolerances)
    for more in turned:
        doubts = doubts | more
    return gA, doubts


@formula(kernel=("default",))
def svd_backward(
    gU: Tensor | None,
    gS: Tensor | None,
    gVh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    """Cotangent of A for those of U, S and V^H.

    Args:
        gU, gS, gVh: cotangents, of the shapes of U, S, Vh; None for zero.
        U, S, Vh: what the decomposition returned, (*, m, k), (*, k), (*, k, n) with k = min(m, n), or the full U
            (*, m, m) and Vh (*, n, n).
        rtol, atol, broadening: see `Degeneracy`.
        gauge: "warn", "error" or "ignore": about a loss that depends on the choice of basis.
    Returns:
        (*, m, n), the dtype of U.
    Raises:
        GaugeError: gauge is "error" and the loss depends on the choice. ValueError: another gauge.
    Where not differentiable: repeated and zero singular values, by the rules in degeneracy.py.
    Source: ATen svd_backward; the module's docstring.
    """
    return _svd_backward(svd_pullback.reference, gU, gS, gVh, U, S, Vh, (rtol, atol, broadening), gauge)[0]


@svd_backward.impl("default")
def _(
    gU: Tensor | None,
    gS: Tensor | None,
    gVh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    gA, doubts = _svd_backward(svd_pullback, gU, gS, gVh, U, S, Vh, (rtol, atol, broadening), gauge)
    report(doubts, gauge, WHAT)
    return gA


@formula(kernel=("cpu", "cuda"))
def svd_pushforward(
    dA: Tensor, U: Tensor, S: Tensor, Vh: Tensor, rtol: float | None, atol: float, broadening: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linalg_svd_jvp` of thin factors; says what it doubts in place of warning.

    Args:
        dA: the tangent of A, (*, m, n). U, S, Vh, rtol, atol, broadening: as for `svd_pullback`.
    Returns:
        The tangents of U, S, Vh, and whether the direction splits a group of equal values anywhere: a 0-dim bool.
    Raises: RuntimeError: shapes, dtypes or devices that do not fit each other.
    Where not differentiable: as linalg_svd_jvp. Source: the module's docstring.
    """
    k = S.shape[-1]
    if 0 in (U.numel(), Vh.numel()):  # with no singular value there is nothing to move
        return U * 0, S * 0, Vh * 0, torch.zeros((), dtype=torch.bool, device=U.device)
    right, left = dA @ Vh.mH, U.mH @ dA
    P = U.mH @ right
    dS = P.diagonal(dim1=-2, dim2=-1)
    dS = dS.real.clone() if dS.is_complex() else dS.clone()
    quotients = Resolved(Scale.of(S, max(U.shape[-2], Vh.shape[-1]), rtol, atol, broadening), right, left.mH)
    first = quotients.by_differences(0.5 * sym(P) - torch.diag_embed(dS), S)
    second = quotients.by_sums(0.5 * skew(P), S)
    dU, dVh = U @ (second + first), (second - first) @ Vh
    if U.shape[-2] > k:
        dU = dU + quotients.by_values(right - U @ P, S, right)
    if Vh.shape[-1] > k:
        dVh = dVh + quotients.by_values((left - P @ Vh).mH, S, left.mH).mH
    return dU, dS, dVh, quotients.doubts


def _linalg_svd_jvp(
    pushforward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    dA: Tensor,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    tolerances: Tolerances,
    gauge: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`svd_pushforward` of thin or full factors."""
    check_gauge(gauge)
    k = S.shape[-1]
    U1, V1h = U[..., :k], Vh[..., :k, :]
    dU, dS, dVh, doubts = pushforward(dA, U1, S, V1h, *tolerances)
    if U.shape[-1] > k:
        dU = torch.cat((dU, -U1 @ (dU.mH @ U[..., k:])), -1)
    if Vh.shape[-2] > k:
        dVh = torch.cat((dVh, -(Vh[..., k:, :] @ dVh.mH) @ V1h), -2)
    return dU, dS, dVh, doubts


@formula(kernel=("default",))
def linalg_svd_jvp(
    dA: Tensor,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of U, S and V^H for that of A, (*, m, n); the rest as for `svd_backward`.

    Returns:
        Tangents of the shapes of U, S, Vh. That of a pair of complex vectors leaves their common phase unchanged.
    Raises:
        GaugeError: gauge is "error" and the direction splits a group of equal values. ValueError: another gauge.
    Where not differentiable: within a group of equal values dS is the diagonal of U^H dA V, and U and V turn only where they
        turn against each other: right for losses such as a polar factor or a projector onto the whole group.
    Source: ATen linalg_svd_jvp; the module's docstring.
    """
    return _linalg_svd_jvp(svd_pushforward.reference, dA, U, S, Vh, (rtol, atol, broadening), gauge)[:3]


@linalg_svd_jvp.impl("default")
def _(
    dA: Tensor,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor, Tensor]:
    dU, dS, dVh, doubts = _linalg_svd_jvp(svd_pushforward, dA, U, S, Vh, (rtol, atol, broadening), gauge)
    report(doubts, gauge, WHAT)
    return dU, dS, dVh


def _svd_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 3), (1, 1), (0, 3, 2), (2, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, dtype=dtype, device=device).mT)
    yield Sample(random_conditioned(4, 2, dtype=dtype, device=device), True)
    yield Sample(random_conditioned(2, 2, 3, dtype=dtype, device=device), True)


def _svd_probe(A: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """What does not depend on the phases: products of paired vectors, and projectors onto what they leave."""
    U, S, Vh = torch.ops.aten._linalg_svd(A, *args, **kwargs)
    k = S.shape[-1]
    pairs = U[..., :k].mT.unsqueeze(-1) * Vh[..., :k, :].unsqueeze(-2)
    return S, pairs, U[..., k:] @ U[..., k:].mH, Vh[..., k:, :].mH @ Vh[..., k:, :]


svd_rule = rule(
    "aten::_linalg_svd",
    vjp={"A": lambda grad_U, grad_S, grad_Vh, U, S, Vh: svd_backward(grad_U, grad_S, grad_Vh, U, S, Vh)},
    jvp={("U", "S", "Vh"): lambda A_t, U, S, Vh: linalg_svd_jvp(A_t, U, S, Vh)},
    uses=(svd_backward, linalg_svd_jvp),
    improves="values",
    source="ATen svd_backward and linalg_svd_jvp; Wan and Zhang, arXiv:1909.02659",
    samples=_svd_samples,
    probe=_svd_probe,
)
