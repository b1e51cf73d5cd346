"""geqrf, which returns $Q$ of $A = Q R$ as Householder reflectors $V$ and numbers $tau$.

A $Q$ with as many columns as reflectors determines them. By the compact form of the product (see householder.py), with the
leading rows $V_1$ of $V$,

    Q - I = V U,      U = -T V_1^H,      diag(U) = -tau,

where $V$ is unit lower trapezoidal and $U$ upper triangular: an LU factorization without pivoting. The derivative is
that of the QR factorization of $A$, followed by that of the LU factorization of $Q - I$. No pivot $tau_i$ is small, because
LAPACK chooses the sign of $R_ii$.

Args:
    a, tau: the packed factors and $tau$, as the forward returned them.

Note:
    Where not differentiable: at a zero pivot of $R$ (see qr.py), and where a $tau_i$ before the last one is 0. There the
    column is already zero below the diagonal, and LAPACK uses no reflector; for nearby matrices it uses one with
    $tau_i = 2$. Tangents of $V$ are inf or nan.

References:
    Ballard, Demmel, Grigori, Jacquelin, Knight, Nguyen, Reconstructing Householder vectors from tall-skinny QR,
    Journal of Parallel and Distributed Computing 85 (2015) 3, doi:10.1016/j.jpdc.2015.06.003, section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from ...core.rule import formula, rule
from .common import leading
from .lu import linalg_lu_backward, linalg_lu_jvp, unpacked
from .qr import linalg_qr_backward, linalg_qr_jvp


def _factors(a: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """$Q$, $R$, $V$ and $U$."""
    below, R = unpacked(a)
    Q = torch.linalg.householder_product(below, tau)
    identity = torch.eye(*Q.shape[-2:], dtype=Q.dtype, device=Q.device)
    k = tau.shape[-1]
    V = below + identity
    U = solve_triangular(leading(V, rows=k), leading(Q - identity, rows=k), upper=False, unitriangular=True)
    return Q, R, V, U.triu()


@formula
def geqrf_backward(grad_a: Tensor | None, grad_tau: Tensor | None, self: Tensor, a: Tensor, tau: Tensor) -> Tensor:
    """Cotangent of $A$, given those of the packed factors and $tau$: from $V$ and $U$ to $Q$, from $Q$ and $R$ to $A$.

    Args:
        grad_a: cotangent of the packed factors, (*, m, n); None for zero.
        grad_tau: cotangent of $tau$, (*, k), $k = min(m, n)$; None for zero.
        self: $A$, (*, m, n), real or complex.

    Returns:
        (*, m, n).

    References:
        `linalg_lu_backward` and `linalg_qr_backward`; PyTorch has no derivative.
    """
    Q, R, V, U = _factors(a, tau)
    grad_V, grad_R = (None, None) if grad_a is None else unpacked(grad_a)
    grad_U = None if grad_tau is None else torch.diag_embed(-grad_tau)
    return linalg_qr_backward(linalg_lu_backward(grad_V, grad_U, V, V, U, False), grad_R, self, Q, R, "reduced")


@formula
def geqrf_jvp(self_t: Tensor, self_p: Tensor, a: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of the packed factors and $tau$: $dR + dV$ and $-diag(dU)$.

    Args:
        self_t: tangent of $A$, (*, m, n).
        self_p: $A$, (*, m, n), real or complex.

    Returns:
        (*, m, n) and (*, k).

    References:
        `linalg_qr_jvp` and `linalg_lu_jvp`; PyTorch has no derivative.
    """
    Q, R, V, U = _factors(a, tau)
    Q_t, R_t = linalg_qr_jvp(self_t, self_p, Q, R, "reduced")
    V_t, U_t = linalg_lu_jvp(Q_t, V, V, U, False)
    m, n, k = *a.shape[-2:], tau.shape[-1]
    return pad(R_t, (0, 0, 0, m - k)) + pad(V_t, (0, n - k)), -U_t.diagonal(dim1=-2, dim2=-1)


rule(
    "aten::geqrf",
    vjp={"self": geqrf_backward},
    jvp={("a", "tau"): geqrf_jvp},
    improves="missing",
    source="the derivatives of linalg_qr and linalg_lu; Ballard et al. 2015, section 5",
)
