"""Eigenvalues and eigenvectors: A V = V diag L, for Hermitian and for general matrices.

With P = V^-1 dA V and the quotients by differences of eigenvalues taken entry by entry off the diagonal,

    dL = diag P,    dV = V (P / (L_j - L_i)),    gA = V^-H [V^H gV / conj(L_j - L_i) + diag gL] V^H.

Hermitian: V^-1 = V^H, and only the anti-Hermitian part of V^H gV counts, as V stays unitary. General: the columns of V
keep norm 1, so dV loses V diag Re(V^H dV), and V^H gV loses V^H V diag Re(V^H gV). The phase of a complex vector is left
unchanged. Where eigenvalues meet: see degeneracy.py.

Sources: Giles, An extended collection of matrix derivative results (2008), 3.1; Boeddeker et al., arXiv:1701.00392,
eq. 4.60 to 4.77, for complex matrices; ATen linalg_eig_backward and linalg_eig_jvp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule

from .common import random, random_conditioned, random_definite, skew, sym
from .degeneracy import Resolved, Scale, Tolerances, check_gauge, report

WHAT = "derivative of the eigendecomposition"


@formula(kernel=("cpu", "cuda"))
def eigh_pullback(
    gL: Tensor | None,
    gV: Tensor | None,
    L: Tensor,
    V: Tensor,
    rtol: float | None,
    atol: float,
    broadening: float,
) -> tuple[Tensor, Tensor]:
    """`linalg_eig_backward` of a Hermitian matrix; says what it doubts in place of warning.

    Args:
        gL, gV: cotangents (*, n) and (*, n, n); None for zero.
        L, V: what the decomposition returned, L real.
        rtol, atol, broadening: see `Degeneracy`.
    Returns:
        The cotangent of A, (*, n, n), and whether the loss depends on the choice of basis anywhere: a 0-dim bool.
    Raises: RuntimeError: shapes, dtypes or devices that do not fit each other.
    Where not differentiable: as linalg_eig_backward. Source: the module's docstring.
    """
    certain = torch.zeros((), dtype=torch.bool, device=V.device)
    if V.numel() == 0 or (gL is None and gV is None):
        return torch.zeros_like(V, memory_format=torch.contiguous_format), certain
    if gV is None:
        assert gL is not None
        return (V * gL.unsqueeze(-2)) @ V.mH, certain
    quotients = Resolved(Scale.of(L, V.shape[-1], rtol, atol, broadening), gV)
    X = V.mH @ gV
    inner = quotients.by_differences(0.5 * skew(X), L, 0.5 * sym(X), gL)
    if gL is not None:
        inner = inner + torch.diag_embed(gL)
    return (V @ inner) @ V.mH, quotients.doubts


def _eig_backward(
    pullback: Callable[..., tuple[Tensor, Tensor]],
    gL: Tensor | None,
    gV: Tensor | None,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    tolerances: Tolerances,
    gauge: str,
) -> tuple[Tensor, Tensor]:
    check_gauge(gauge)
    if is_hermitian:
        return pullback(gL, gV, L, V, *tolerances)
    doubts = torch.zeros((), dtype=torch.bool, device=V.device)
    if V.numel() == 0 or (gL is None and gV is None):
        return torch.zeros_like(V), doubts
    inner = None
    if gL is not None:
        inner = gL.unsqueeze(-1) * V.mH
    if gV is not None:
        quotients = Resolved(Scale.of(L, V.shape[-1], *tolerances), gV)
        X = V.mH @ gV
        lengths = X.diagonal(dim1=-2, dim2=-1).real
        between = quotients.by_differences(X - V.mH @ (V * lengths.unsqueeze(-2)), L.conj()) @ V.mH
        inner = between if inner is None else inner + between
        doubts = quotients.doubts
    return torch.linalg.solve(V.mH, inner), doubts


@formula(kernel=("default",))
def linalg_eig_backward(
    gL: Tensor | None,
    gV: Tensor | None,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    """Cotangent of A for those of its eigenvalues and eigenvectors.

    Args:
        gL, gV: cotangents (*, n) and (*, n, n); None for zero.
        L, V: what the decomposition returned. Hermitian: L real. General: both complex.
        is_hermitian: which of the two.
        rtol, atol, broadening: see `Degeneracy`.
        gauge: "warn", "error" or "ignore": about a loss that depends on the choice of basis.
    Returns:
        (*, n, n), the dtype of V; Hermitian for a Hermitian A.
    Raises:
        GaugeError: gauge is "error" and the loss depends on the choice. ValueError: another gauge.
    Where not differentiable: repeated eigenvalues, by the rules in degeneracy.py (2 for Hermitian A only). A matrix that
        cannot be diagonalised has no derivative; the result is not finite there, or an error of the solver.
    Source: ATen linalg_eig_backward; the module's docstring.
    """
    return _eig_backward(eigh_pullback.reference, gL, gV, L, V, is_hermitian, (rtol, atol, broadening), gauge)[0]


@linalg_eig_backward.impl("default")
def _(
    gL: Tensor | None,
    gV: Tensor | None,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    gA, doubts = _eig_backward(eigh_pullback, gL, gV, L, V, is_hermitian, (rtol, atol, broadening), gauge)
    report(doubts, gauge, WHAT)
    return gA


@formula(kernel=("cpu", "cuda"))
def eigh_pushforward(
    dA: Tensor, L: Tensor, V: Tensor, rtol: float | None, atol: float, broadening: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`linalg_eig_jvp` of a Hermitian matrix; says what it doubts in place of warning.

    Args:
        dA: the tangent of A, (*, n, n). L, V, rtol, atol, broadening: as for `eigh_pullback`.
    Returns:
        The tangents of L and V, and whether the direction splits a group of equal values anywhere: a 0-dim bool.
    Raises: RuntimeError: shapes, dtypes or devices that do not fit each other.
    Where not differentiable: as linalg_eig_jvp. Source: the module's docstring.
    """
    if V.numel() == 0:
        none = torch.zeros((), dtype=torch.bool, device=V.device)
        return torch.zeros_like(L), torch.zeros_like(V, memory_format=torch.contiguous_format), none
    right = dA @ V
    P = 0.5 * sym(V.mH @ right)
    dL = P.diagonal(dim1=-2, dim2=-1)
    dL = dL.real.clone() if dL.is_complex() else dL.clone()
    quotients = Resolved(Scale.of(L, V.shape[-1], rtol, atol, broadening), right)
    dV = V @ quotients.by_differences(P - torch.diag_embed(dL), L)
    return dL, dV, quotients.doubts


def _eig_jvp(
    pushforward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    dA: Tensor,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    tolerances: Tolerances,
    gauge: str,
) -> tuple[Tensor, Tensor, Tensor]:
    check_gauge(gauge)
    if is_hermitian:
        return pushforward(dA, L, V, *tolerances)
    if V.numel() == 0:
        return torch.zeros_like(L), torch.zeros_like(V), torch.zeros((), dtype=torch.bool, device=V.device)
    P = torch.linalg.solve(V, dA.to(V.dtype) @ V)
    dL = P.diagonal(dim1=-2, dim2=-1).clone()
    quotients = Resolved(Scale.of(L, V.shape[-1], *tolerances), P)
    dV = V @ quotients.by_differences(P - torch.diag_embed(dL), L)
    lengths = (V.conj() * dV).sum(-2, keepdim=True).real
    return dL, dV - V * lengths, quotients.doubts


@formula(kernel=("default",))
def linalg_eig_jvp(
    dA: Tensor,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor]:
    """Tangents of eigenvalues and eigenvectors for that of A, (*, n, n); the rest as for `linalg_eig_backward`.

    Returns:
        Tangents of the shapes of L and V.
    Raises:
        GaugeError: gauge is "error" and the direction splits a group of equal values. ValueError: another gauge.
    Where not differentiable: within a group of equal eigenvalues dL is the diagonal of V^-1 dA V, and V does not turn.
    Source: ATen linalg_eig_jvp; the module's docstring.
    """
    return _eig_jvp(eigh_pushforward.reference, dA, L, V, is_hermitian, (rtol, atol, broadening), gauge)[:2]


@linalg_eig_jvp.impl("default")
def _(
    dA: Tensor,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor]:
    dL, dV, doubts = _eig_jvp(eigh_pushforward, dA, L, V, is_hermitian, (rtol, atol, broadening), gauge)
    report(doubts, gauge, WHAT)
    return dL, dV


def _eig_vjp(
    grad_eigenvalues: Tensor | None,
    grad_eigenvectors: Tensor | None,
    self_dtype: torch.dtype,
    eigenvalues: Tensor,
    eigenvectors: Tensor,
) -> Tensor:
    gA = linalg_eig_backward(grad_eigenvalues, grad_eigenvectors, eigenvalues, eigenvectors, False)
    return gA if self_dtype.is_complex else gA.real


def _projectors(L: Tensor, V: Tensor) -> Tensor:
    """v_i v_i^H, which have no phase."""
    return V.mT.unsqueeze(-1) * V.mH.unsqueeze(-2)


def _eigh_probe(A: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    L, V = torch.ops.aten._linalg_eigh(0.5 * sym(A), *args, **kwargs)
    return L, _projectors(L, V)


def _eig_probe(A: Tensor) -> tuple[Tensor, Tensor]:
    L, V = torch.ops.aten.linalg_eig(A)
    return L, _projectors(L, V)


def _eigh_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 4), (1, 1), (0, 2, 2), (0, 0)):
        yield Sample(
            random_definite(*shape, dtype=dtype, device=device) - 2 * torch.eye(shape[-1], dtype=dtype, device=device)
        )
    yield Sample(random_definite(3, 3, dtype=dtype, device=device), "U")
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device).mT)


def _eig_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 4), (1, 1), (0, 2, 2), (0, 0)):
        skewed = torch.diag_embed(torch.arange(shape[-1], device=device)).to(dtype)
        yield Sample(0.4 * random(*shape, dtype=dtype, device=device, seed=1) + skewed)
    yield Sample(random_conditioned(3, 3, dtype=dtype, device=device).mT)


eigh_rule = rule(
    "aten::_linalg_eigh",
    vjp={
        "A": lambda grad_eigenvalues, grad_eigenvectors, eigenvalues, eigenvectors: linalg_eig_backward(
            grad_eigenvalues, grad_eigenvectors, eigenvalues, eigenvectors, True
        )
    },
    jvp={
        ("eigenvalues", "eigenvectors"): lambda A_t, eigenvalues, eigenvectors: linalg_eig_jvp(
            A_t, eigenvalues, eigenvectors, True
        )
    },
    uses=(linalg_eig_backward, linalg_eig_jvp),
    improves="values",
    source="ATen linalg_eig_backward and linalg_eig_jvp; Giles (2008), 3.1",
    samples=_eigh_samples,
    probe=_eigh_probe,
)
rule(
    "aten::linalg_eig",
    vjp={"self": _eig_vjp},
    jvp={
        ("eigenvalues", "eigenvectors"): lambda self_t, eigenvalues, eigenvectors: linalg_eig_jvp(
            self_t, eigenvalues, eigenvectors, False
        )
    },
    uses=(linalg_eig_backward, linalg_eig_jvp),
    improves="values",
    source="ATen linalg_eig_backward and linalg_eig_jvp; Boeddeker et al., arXiv:1701.00392, eq. 4.77",
    samples=_eig_samples,
    probe=_eig_probe,
)
