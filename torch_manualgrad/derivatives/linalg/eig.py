"""The eigendecomposition of a general matrix, $A = V diag(L) V^-1$.

With $P = V^-1 dA V$ and the quotients by differences of eigenvalues taken entry by entry off the diagonal,

    dL = diag P,    dV = V (P / (L_j - L_i)),    gA = V^-H [V^H gV / conj(L_j - L_i) + diag gL] V^H.

The columns of $V$ keep norm 1, so $dV$ loses $V diag Re(V^H dV)$, and $V^H gV$ loses $V^H V diag Re(V^H gV)$. The phase
of a vector is left unchanged. At equal eigenvalues: see degeneracy.py.

Args:
    L: eigenvalues, as the decomposition returned them, (*, n), complex.
    V: eigenvectors, as the decomposition returned them, (*, n, n), complex.

References:
    Giles, An extended collection of matrix derivative results (2008), 3.1; Boeddeker et al., arXiv:1701.00392, eq. 4.60
    to 4.77, for complex matrices; ATen linalg_eig_backward and linalg_eig_jvp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from .degeneracy import Resolved, Scale
from .eigh import WHAT, linalg_eigh_backward, linalg_eigh_jvp
from .gauge import check_gauge, gauge_independent, reported


def _is_general(is_hermitian: bool) -> bool:
    return not is_hermitian


def _pullback(
    grad_L: Tensor | None,
    grad_V: Tensor | None,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None,
    atol: float,
    broadening: float,
) -> tuple[Tensor, Tensor]:
    """`linalg_eig_backward` of a general matrix, and a bool without dims: whether the loss depends on the basis."""
    gauge_dependent = gauge_independent(V)
    if V.numel() == 0 or (grad_L is None and grad_V is None):
        return torch.zeros_like(V), gauge_dependent
    inner = None
    if grad_L is not None:
        inner = grad_L.unsqueeze(-1) * V.mH
    if grad_V is not None:
        quotients = Resolved(Scale.of(L, V.shape[-1], rtol, atol, broadening), grad_V)
        X = V.mH @ grad_V
        lengths = X.diagonal(dim1=-2, dim2=-1).real
        between = quotients.by_differences(X - V.mH @ (V * lengths.unsqueeze(-2)), L.conj()) @ V.mH
        inner = between if inner is None else inner + between
        gauge_dependent = quotients.gauge_dependent
    return torch.linalg.solve(V.mH, inner), gauge_dependent


@formula(kernels=Kernel(when=_is_general, python=reported(WHAT, _pullback), tracked=True))
def linalg_eig_backward(
    grad_L: Tensor | None,
    grad_V: Tensor | None,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    """Cotangent of $A$, given those of its eigenvalues $L$ and eigenvectors $V$.

    Args:
        grad_L: cotangent of $L$, (*, n); None for zero.
        grad_V: cotangent of $V$, (*, n, n); None for zero.
        is_hermitian: whether $A$ is Hermitian: this is then `linalg_eigh_backward`.
        rtol, atol, broadening: see `Degeneracy`.
        gauge: "warn", "error" or "ignore", for a loss that depends on the choice of basis.

    Returns:
        (*, n, n), the dtype of ``V``.

    Raises:
        GaugeError, ValueError: as in `svd_backward`.

    Note:
        Where not differentiable: at repeated eigenvalues, to which the rules in degeneracy.py apply, except rule 2. A matrix
        that cannot be diagonalized has no derivative: the result is not finite, or the solver raises.

    References:
        ATen linalg_eig_backward; Boeddeker et al., arXiv:1701.00392, eq. 4.77.
    """
    if is_hermitian:
        return linalg_eigh_backward(grad_L, grad_V, L, V, rtol, atol, broadening, gauge)
    check_gauge(gauge)
    return _pullback(grad_L, grad_V, L, V, is_hermitian, rtol, atol, broadening)[0]


def _pushforward(
    A_t: Tensor, L: Tensor, V: Tensor, is_hermitian: bool, rtol: float | None, atol: float, broadening: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`linalg_eig_jvp` of a general matrix, and a bool without dims: whether the direction splits a group."""
    if V.numel() == 0:
        return torch.zeros_like(L), torch.zeros_like(V), gauge_independent(V)
    P = torch.linalg.solve(V, A_t.to(V.dtype) @ V)
    L_t = P.diagonal(dim1=-2, dim2=-1).clone()
    quotients = Resolved(Scale.of(L, V.shape[-1], rtol, atol, broadening), P)
    V_t = V @ quotients.by_differences(P - torch.diag_embed(L_t), L)
    lengths = (V.conj() * V_t).sum(-2, keepdim=True).real
    return L_t, V_t - V * lengths, quotients.gauge_dependent


@formula(kernels=Kernel(when=_is_general, python=reported(WHAT, _pushforward), tracked=True))
def linalg_eig_jvp(
    A_t: Tensor,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor]:
    """Tangents of the eigenvalues $L$ and eigenvectors $V$, given that of $A$.

    Args:
        A_t: tangent of $A$, (*, n, n), real or complex.
        is_hermitian: whether $A$ is Hermitian: this is then `linalg_eigh_jvp`.
        rtol, atol, broadening, gauge: as in `svd_backward`, for a direction that splits a group of equal values.

    Returns:
        Tangents of the shapes of ``L`` and ``V``.

    Raises:
        GaugeError, ValueError: as in `svd_backward`.

    Note:
        Where not differentiable: at equal eigenvalues. Within a group, the tangent of $L$ is the diagonal of $V^-1 dA V$, and
        $V$ does not rotate.

    References:
        ATen linalg_eig_jvp; Boeddeker et al., arXiv:1701.00392, eq. 4.60 to 4.77.
    """
    if is_hermitian:
        return linalg_eigh_jvp(A_t, L, V, rtol, atol, broadening, gauge)
    check_gauge(gauge)
    L_t, V_t, _ = _pushforward(A_t, L, V, is_hermitian, rtol, atol, broadening)
    return L_t, V_t


def _vjp(
    grad_eigenvalues: Tensor | None,
    grad_eigenvectors: Tensor | None,
    self_dtype: torch.dtype,
    eigenvalues: Tensor,
    eigenvectors: Tensor,
) -> Tensor:
    grad_A = linalg_eig_backward(grad_eigenvalues, grad_eigenvectors, eigenvalues, eigenvectors, False)
    return grad_A if self_dtype.is_complex else grad_A.real


rule(
    "aten::linalg_eig",
    vjp={"self": _vjp},
    jvp={
        ("eigenvalues", "eigenvectors"): linalg_eig_jvp.bind(
            A_t="self_t", L="eigenvalues", V="eigenvectors", is_hermitian=False
        )
    },
    improves="values",
    source="ATen linalg_eig_backward and linalg_eig_jvp; Boeddeker et al., arXiv:1701.00392, eq. 4.77",
)
