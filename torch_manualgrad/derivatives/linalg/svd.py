"""The singular value decomposition $A = U S V^H$, thin or full.

With $P = U^H dA V$, its Hermitian part $h = (P + P^H)/2$ and anti-Hermitian part $w = (P - P^H)/2$, and the quotients
by differences and sums of singular values taken entry by entry,

    dS = Re diag P,    dU = U (h / (s_j - s_i) + w / (s_j + s_i)),    dV = V (h / (s_j - s_i) - w / (s_j + s_i)),

to which $(I - U U^H) dA V S^-1$ is added for $dU$ and $(I - V V^H) dA^H U S^-1$ for $dV$. The adjoint, with
$a = U^H gU - gU^H U$ and $b = V^H gV - gV^H V$:

    gA = U [(a + b) / (2 (s_j - s_i)) + (a - b) / (2 (s_j + s_i)) + diag gS] V^H
         + (I - U U^H) gU S^-1 V^H + U S^-1 gV^H (I - V V^H).

Only the first quotient is singular where singular values are equal, only the others where they vanish: see
degeneracy.py. The common phase of a pair of complex vectors is left unchanged. The further columns $U2$ of a full $U$
span the orthogonal complement of $U$. Their derivative is taken orthogonal to their span, $dU2 = -U dU^H U2$, which is right
for every loss of $U2 U2^H$. The same holds for $V2$. A loss that depends on the choice of their basis is reported.

Args:
    U: as the decomposition returned it, (*, m, k) with $k = min(m, n)$, or in full (*, m, m); real or complex.
    S: (*, k), real.
    Vh: (*, k, n), or in full (*, n, n).

References:
    Townsend, Differentiating the singular value decomposition (2016); Wan and Zhang, arXiv:1909.02659, for complex
    matrices; ATen svd_backward and linalg_svd_jvp, whose single denominator $s_j^2 - s_i^2$ is split here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_manualgrad.core.rule import CompiledVjp, Kernel, formula, rule

from .common import skew, sym
from .degeneracy import Degeneracy, Resolved, Scale
from .gauge import check_gauge, depends_on_basis, gauge_independent, reported, warn

WHAT = "derivative of the singular value decomposition"


def _pullback(
    grad_U: Tensor | None,
    grad_S: Tensor | None,
    grad_Vh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None,
    atol: float,
    broadening: float,
) -> tuple[Tensor, Tensor]:
    """`svd_backward` of thin factors, and a bool without dims: whether the loss depends on the choice of basis."""
    k = S.shape[-1]
    if 0 in (U.numel(), Vh.numel()) or (grad_U is None and grad_S is None and grad_Vh is None):
        return U.new_zeros((*U.shape[:-1], Vh.shape[-1])), gauge_independent(U)
    if grad_U is None and grad_Vh is None:
        assert grad_S is not None
        return (U * grad_S.unsqueeze(-2)) @ Vh, gauge_independent(U)
    grad_V, V = None if grad_Vh is None else grad_Vh.mH, Vh.mH
    quotients = Resolved(Scale.of(S, max(U.shape[-2], V.shape[-2]), rtol, atol, broadening), grad_U, grad_V)
    X = None if grad_U is None else U.mH @ grad_U
    Y = None if grad_V is None else Vh @ grad_V
    zero = torch.zeros_like(quotients.pair_noise)
    a, c = (zero, zero) if X is None else (skew(X), sym(X))
    b, d = (zero, zero) if Y is None else (skew(Y), sym(Y))
    inner = quotients.by_differences(0.5 * (a + b), S, 0.25 * (c + d), grad_S) + quotients.by_sums(0.5 * (a - b), S)
    if grad_S is not None:
        inner = inner + torch.diag_embed(grad_S)
    left = U @ inner
    if grad_U is not None and X is not None and U.shape[-2] > k:
        left = left + quotients.by_values(grad_U - U @ X, S, grad_U)
    grad_A = left @ Vh
    if grad_V is not None and Y is not None and V.shape[-2] > k:
        grad_A = grad_A + U @ quotients.by_values(grad_V - V @ Y, S, grad_V).mH
    return grad_A, quotients.gauge_dependent


def _thin(
    grad_U: Tensor | None, grad_Vh: Tensor | None, U: Tensor, S: Tensor, Vh: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """(grad_U, grad_Vh, U, Vh) of the first $k$ columns and rows: the cotangents of the others act through these."""
    k = S.shape[-1]
    if U.shape[-1] > k:
        U, rest = U[..., :k], U[..., k:]
        grad_U = grad_U if grad_U is None else grad_U[..., :k] - rest @ (grad_U[..., k:].mH @ U)
    if Vh.shape[-2] > k:
        Vh, rest = Vh[..., :k, :], Vh[..., k:, :]
        grad_Vh = grad_Vh if grad_Vh is None else grad_Vh[..., :k, :] - (Vh @ grad_Vh[..., k:, :].mH) @ rest
    return grad_U, grad_Vh, U, Vh


def _whole_pullback(
    thin_pullback: Callable[..., tuple[Tensor, Tensor]],
    grad_U: Tensor | None,
    grad_S: Tensor | None,
    grad_Vh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    *tolerances: float | None,
) -> tuple[Tensor, Tensor]:
    """`_pullback` of thin or full factors."""
    k = S.shape[-1]
    gU, gVh, thin_U, thin_Vh = _thin(grad_U, grad_Vh, U, S, Vh)
    grad_A, gauge_dependent = thin_pullback(gU, grad_S, gVh, thin_U, S, thin_Vh, *tolerances)
    if grad_U is not None and U.shape[-1] > k:
        gauge_dependent = gauge_dependent | depends_on_basis(U[..., k:], grad_U[..., k:])
    if grad_Vh is not None and Vh.shape[-2] > k:
        gauge_dependent = gauge_dependent | depends_on_basis(Vh[..., k:, :].mH, grad_Vh[..., k:, :].mH)
    return grad_A, gauge_dependent


@formula(kernels=Kernel("cpu", "cuda", compiled=_pullback, python=reported(WHAT, _whole_pullback), tracked=True))
def svd_backward(
    grad_U: Tensor | None,
    grad_S: Tensor | None,
    grad_Vh: Tensor | None,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    """Cotangent of $A$, given those of $U$, $S$ and $V^H$.

    Args:
        grad_U: cotangent of $U$, the shape of ``U``; None for zero.
        grad_S: cotangent of $S$, (*, k), real; None for zero.
        grad_Vh: cotangent of $V^H$, the shape of ``Vh``; None for zero.
        rtol, atol, broadening: see `Degeneracy`.
        gauge: "warn", "error" or "ignore", for a loss that depends on the choice of basis.

    Returns:
        (*, m, n), the dtype of ``U``.

    Raises:
        GaugeError: gauge is "error" and the loss depends on the choice.
        ValueError: an unknown gauge.

    Note:
        Where not differentiable: at repeated and zero singular values; see the rules in degeneracy.py.

    References:
        ATen svd_backward; Wan and Zhang, arXiv:1909.02659.
    """
    check_gauge(gauge)
    grad_U, grad_Vh, U, Vh = _thin(grad_U, grad_Vh, U, S, Vh)
    return _pullback(grad_U, grad_S, grad_Vh, U, S, Vh, rtol, atol, broadening)[0]


def _pushforward(
    A_t: Tensor, U: Tensor, S: Tensor, Vh: Tensor, rtol: float | None, atol: float, broadening: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linalg_svd_jvp` of thin factors, and a bool without dims: whether the direction splits a group of values."""
    k = S.shape[-1]
    if 0 in (U.numel(), Vh.numel()):  # no singular values
        return U * 0, S * 0, Vh * 0, gauge_independent(U)
    right, left = A_t @ Vh.mH, U.mH @ A_t
    P = U.mH @ right
    S_t = P.diagonal(dim1=-2, dim2=-1)
    S_t = S_t.real.clone() if S_t.is_complex() else S_t.clone()
    quotients = Resolved(Scale.of(S, max(U.shape[-2], Vh.shape[-1]), rtol, atol, broadening), right, left.mH)
    first = quotients.by_differences(0.5 * sym(P) - torch.diag_embed(S_t), S)
    second = quotients.by_sums(0.5 * skew(P), S)
    U_t, Vh_t = U @ (second + first), (second - first) @ Vh
    if U.shape[-2] > k:
        U_t = U_t + quotients.by_values(right - U @ P, S, right)
    if Vh.shape[-1] > k:
        Vh_t = Vh_t + quotients.by_values((left - P @ Vh).mH, S, left.mH).mH
    return U_t, S_t, Vh_t, quotients.gauge_dependent


def _with_complements(U_t: Tensor, Vh_t: Tensor, U: Tensor, S: Tensor, Vh: Tensor) -> tuple[Tensor, Tensor]:
    """The tangents of $U$ and $V^H$ with those of the further columns and rows."""
    k = S.shape[-1]
    if U.shape[-1] > k:
        U_t = torch.cat((U_t, -U[..., :k] @ (U_t.mH @ U[..., k:])), -1)
    if Vh.shape[-2] > k:
        Vh_t = torch.cat((Vh_t, -(Vh[..., k:, :] @ Vh_t.mH) @ Vh[..., :k, :]), -2)
    return U_t, Vh_t


def _whole_pushforward(
    thin_pushforward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    A_t: Tensor,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    *tolerances: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_pushforward` of thin or full factors."""
    k = S.shape[-1]
    U_t, S_t, Vh_t, gauge_dependent = thin_pushforward(A_t, U[..., :k], S, Vh[..., :k, :], *tolerances)
    U_t, Vh_t = _with_complements(U_t, Vh_t, U, S, Vh)
    return U_t, S_t, Vh_t, gauge_dependent


@formula(kernels=Kernel("cpu", "cuda", compiled=_pushforward, python=reported(WHAT, _whole_pushforward), tracked=True))
def linalg_svd_jvp(
    A_t: Tensor,
    U: Tensor,
    S: Tensor,
    Vh: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of $U$, $S$ and $V^H$, given that of $A$.

    Args:
        A_t: tangent of $A$, (*, m, n), the dtype of ``U``.
        rtol, atol, broadening, gauge: as in `svd_backward`, for a direction that splits a group of equal values.

    Returns:
        Tangents of the shapes of ``U``, ``S`` and ``Vh``. The common phase of a pair of complex vectors is left unchanged.

    Raises:
        GaugeError, ValueError: as in `svd_backward`.

    Note:
        Where not differentiable: at equal values. Within a group, the tangent of $S$ is the diagonal of $U^H dA V$, and $U$
        and $V$ rotate only relative to each other. That is right for losses such as a polar factor or a projector onto the
        whole group.

    References:
        ATen linalg_svd_jvp; Wan and Zhang, arXiv:1909.02659.
    """
    check_gauge(gauge)
    k = S.shape[-1]
    U_t, S_t, Vh_t, _ = _pushforward(A_t, U[..., :k], S, Vh[..., :k, :], rtol, atol, broadening)
    U_t, Vh_t = _with_complements(U_t, Vh_t, U, S, Vh)
    return U_t, S_t, Vh_t


svd_rule = rule(
    "aten::_linalg_svd",
    vjp={"A": svd_backward},
    compiled_vjp=CompiledVjp(
        "A", svd_backward, vars(Degeneracy()), only={"full_matrices": False}, reports=partial(warn, WHAT), on_cpu=True
    ),
    jvp={("U", "S", "Vh"): linalg_svd_jvp},
    improves="values",
    source="ATen svd_backward and linalg_svd_jvp; Wan and Zhang, arXiv:1909.02659",
)
