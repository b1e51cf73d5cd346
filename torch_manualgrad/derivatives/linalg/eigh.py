"""The eigendecomposition of a Hermitian matrix, $A = V diag(L) V^H$.

With $P = V^H dA V$ and the quotients by differences of eigenvalues taken entry by entry off the diagonal,

    dL = diag P,    dV = V (P / (L_j - L_i)),    gA = V [w / (L_j - L_i) + diag gL] V^H,

with $w = (X - X^H) / 2$ for $X = V^H gV$: only the anti-Hermitian part matters, because $V$ stays unitary. The phase of a
complex vector is left unchanged. At equal eigenvalues: see degeneracy.py.

Args:
    L: eigenvalues, as the decomposition returned them, (*, n), real.
    V: eigenvectors, as the decomposition returned them, (*, n, n), real or complex.

References:
    Giles, An extended collection of matrix derivative results (2008), 3.1; ATen linalg_eig_backward and linalg_eig_jvp
    with is_hermitian.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torch_manualgrad.core.rule import CompiledVjp, Kernel, formula, rule

from .common import skew, sym
from .degeneracy import Degeneracy, Resolved, Scale
from .gauge import check_gauge, gauge_independent, reported, warn

WHAT = "derivative of the eigendecomposition"


def _pullback(
    grad_L: Tensor | None,
    grad_V: Tensor | None,
    L: Tensor,
    V: Tensor,
    rtol: float | None,
    atol: float,
    broadening: float,
) -> tuple[Tensor, Tensor]:
    """`linalg_eigh_backward`, and a bool without dims: whether the loss depends on the choice of basis."""
    if V.numel() == 0 or (grad_L is None and grad_V is None):
        return torch.zeros_like(V, memory_format=torch.contiguous_format), gauge_independent(V)
    if grad_V is None:
        assert grad_L is not None
        return (V * grad_L.unsqueeze(-2)) @ V.mH, gauge_independent(V)
    quotients = Resolved(Scale.of(L, V.shape[-1], rtol, atol, broadening), grad_V)
    X = V.mH @ grad_V
    inner = quotients.by_differences(0.5 * skew(X), L, 0.5 * sym(X), grad_L)
    if grad_L is not None:
        inner = inner + torch.diag_embed(grad_L)
    return (V @ inner) @ V.mH, quotients.gauge_dependent


@formula(kernels=Kernel("cpu", "cuda", compiled=_pullback, python=reported(WHAT), tracked=True))
def linalg_eigh_backward(
    grad_L: Tensor | None,
    grad_V: Tensor | None,
    L: Tensor,
    V: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> Tensor:
    """Cotangent of a Hermitian matrix $A$, given those of its eigenvalues $L$ and eigenvectors $V$.

    Args:
        grad_L: cotangent of $L$, (*, n), real; None for zero.
        grad_V: cotangent of $V$, (*, n, n); None for zero.
        rtol, atol, broadening: see `Degeneracy`.
        gauge: "warn", "error" or "ignore", for a loss that depends on the choice of basis.

    Returns:
        Hermitian, (*, n, n), the dtype of ``V``.

    Raises:
        GaugeError, ValueError: as in `svd_backward`.

    Note:
        Where not differentiable: at repeated eigenvalues; see the rules in degeneracy.py.

    References:
        ATen linalg_eig_backward with is_hermitian; Giles (2008), 3.1.
    """
    check_gauge(gauge)
    return _pullback(grad_L, grad_V, L, V, rtol, atol, broadening)[0]


def _pushforward(
    A_t: Tensor, L: Tensor, V: Tensor, rtol: float | None, atol: float, broadening: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`linalg_eigh_jvp`, and a bool without dims: whether the direction splits a group of equal values."""
    if V.numel() == 0:
        return (
            torch.zeros_like(L),
            torch.zeros_like(V, memory_format=torch.contiguous_format),
            gauge_independent(V),
        )
    right = A_t @ V
    P = 0.5 * sym(V.mH @ right)
    L_t = P.diagonal(dim1=-2, dim2=-1)
    L_t = L_t.real.clone() if L_t.is_complex() else L_t.clone()
    quotients = Resolved(Scale.of(L, V.shape[-1], rtol, atol, broadening), right)
    V_t = V @ quotients.by_differences(P - torch.diag_embed(L_t), L)
    return L_t, V_t, quotients.gauge_dependent


@formula(kernels=Kernel("cpu", "cuda", compiled=_pushforward, python=reported(WHAT), tracked=True))
def linalg_eigh_jvp(
    A_t: Tensor,
    L: Tensor,
    V: Tensor,
    rtol: float | None = None,
    atol: float = 0.0,
    broadening: float = 0.0,
    gauge: str = "warn",
) -> tuple[Tensor, Tensor]:
    """Tangents of the eigenvalues $L$ and eigenvectors $V$ of a Hermitian matrix $A$, given that of $A$.

    Args:
        A_t: tangent of $A$, (*, n, n); its Hermitian part is taken.
        rtol, atol, broadening, gauge: as in `svd_backward`, for a direction that splits a group of equal values.

    Returns:
        Tangents of the shapes of ``L`` and ``V``.

    Raises:
        GaugeError, ValueError: as in `svd_backward`.

    Note:
        Where not differentiable: at equal eigenvalues. Within a group, the tangent of $L$ is the diagonal of $V^H dA V$, and
        $V$ does not rotate.

    References:
        ATen linalg_eig_jvp with is_hermitian; Giles (2008), 3.1.
    """
    check_gauge(gauge)
    L_t, V_t, _ = _pushforward(A_t, L, V, rtol, atol, broadening)
    return L_t, V_t


_OUTPUTS = {"L": "eigenvalues", "V": "eigenvectors"}
_GRADS = {"grad_L": "grad_eigenvalues", "grad_V": "grad_eigenvectors"}

eigh_rule = rule(
    "aten::_linalg_eigh",
    vjp={"A": linalg_eigh_backward.bind(**_GRADS, **_OUTPUTS)},
    jvp={("eigenvalues", "eigenvectors"): linalg_eigh_jvp.bind(**_OUTPUTS)},
    compiled_vjp=CompiledVjp(
        "A", linalg_eigh_backward, _GRADS | _OUTPUTS | vars(Degeneracy()), reports=partial(warn, WHAT), on_cpu=True
    ),
    improves="values",
    source="ATen linalg_eig_backward and linalg_eig_jvp; Giles (2008), 3.1",
)
