"""The complex Schur form, $A = Q T Q^H$, with $T$ upper triangular and $Q$ unitary.

With $M = Q^H dA Q$ and $dQ = Q W$ for a skew-Hermitian $W$,

    dT = M + T W - W T,

whose part below the diagonal is 0. With $W = X - X^H$ and a strictly lower triangular $X$, that part does not contain $X^H$:

    low(X T - T X) = low(M),

which is solved column by column, from the first: $(t_jj I - T_jj) x_j = m_j - (X T)_j$, with $T_jj$ the rows and columns of $T$
after $j$. The phases of the columns of $Q$ are left unchanged, diag $W = 0$. The vjp solves the adjoint equation, from the last
column to the first,

    low(Y T^H - T^H Y) = low(K - K^H),    K = Q^H gQ + T^H gT - gT T^H,    gA = Q (gT + Y) Q^H,

with $gT$ the upper triangle of the cotangent.

Args:
    T: (*, n, n), complex, upper triangular, with different entries on the diagonal.
    Q: (*, n, n), complex, unitary.

Note:
    Where not differentiable: where eigenvalues are equal. The result is inf or nan there. A loss that depends on the
    phases of the columns of $Q$ has no derivative: the phases are kept fixed, and the loss is reported (see gauge.py).

References:
    Konstantinov, Petkov and Christov, SIAM J. Matrix Anal. Appl. 15 (1994) 383; Golub and Van Loan,
    Matrix Computations, 7.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula

from .common import skew
from .gauge import check_gauge, gauge_independent, reported

__all__ = ["schur_backward", "schur_jvp"]

WHAT = "derivative of the Schur form"


def _below(columns: list[Tensor], n: int) -> Tensor:
    """The strictly lower triangular matrix of order $n$ with these columns below the diagonal; the last column has none."""
    padded = [torch.constant_pad_nd(x, (0, 0, n - x.shape[-2], 0)) for x in columns]
    return torch.cat([*padded, torch.zeros_like(padded[-1])], -1)


def _solve(T: Tensor, M: Tensor) -> Tensor:
    """The strictly lower triangular $X$ with $low(X T - T X) = low(M)$."""
    n = T.shape[-1]
    identity = torch.eye(n, dtype=T.dtype, device=T.device)
    columns: list[Tensor] = []
    for j in range(n - 1):
        right = M[..., j + 1 :, j : j + 1]
        if j:
            known = torch.cat([x[..., j - k :, :] for k, x in enumerate(columns)], -1)  # rows after j
            right = right - known @ T[..., :j, j : j + 1]
        shifted = T[..., j : j + 1, j : j + 1] * identity[j + 1 :, j + 1 :] - T[..., j + 1 :, j + 1 :]
        columns.append(torch.linalg.solve_triangular(shifted, right, upper=True))
    return _below(columns, n) if columns else torch.zeros_like(M)


def _solve_adjoint(T: Tensor, N: Tensor) -> Tensor:
    """The strictly lower triangular $Y$ with $low(Y T^H - T^H Y) = low(N)$."""
    n = T.shape[-1]
    identity = torch.eye(n, dtype=T.dtype, device=T.device)
    columns: list[Tensor] = []  # from the last column to the first
    for j in reversed(range(n - 1)):
        right = N[..., j + 1 :, j : j + 1]
        if columns:
            right = right - _below(columns[::-1], n - j - 1) @ T[..., j : j + 1, j + 1 :].mH
        shifted = T[..., j : j + 1, j : j + 1] * identity[j + 1 :, j + 1 :] - T[..., j + 1 :, j + 1 :]
        columns.append(torch.linalg.solve_triangular(shifted.mH, right, upper=False))
    return _below(columns[::-1], n) if columns else torch.zeros_like(N)


def _pullback(grad_T: Tensor | None, grad_Q: Tensor | None, T: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """`schur_backward`, and a bool without dims: whether the loss depends on the phases."""
    if T.numel() == 0 or (grad_T is None and grad_Q is None):
        return torch.zeros_like(T), gauge_independent(T)
    upper = None if grad_T is None else grad_T.triu()
    K = None if grad_Q is None else Q.mH @ grad_Q
    size = 0 if grad_Q is None else grad_Q.detach().abs().amax((-2, -1), keepdim=True)
    if upper is not None:
        turned = T.mH @ upper - upper @ T.mH
        K = turned if K is None else K + turned
        size = size + (
            T.detach().abs().amax((-2, -1), keepdim=True) * upper.detach().abs().amax((-2, -1), keepdim=True)
        )
    assert K is not None
    Y = _solve_adjoint(T, skew(K))
    noise = 8 * T.shape[-1] * torch.finfo(T.dtype).eps ** 0.5 * size
    phases = K.detach().diagonal(dim1=-2, dim2=-1).imag.abs()
    dependent = (phases > noise.squeeze(-1)).any()
    return Q @ (Y if upper is None else Y + upper) @ Q.mH, dependent


@formula(kernels=Kernel(python=reported(WHAT, _pullback), tracked=True))
def schur_backward(grad_T: Tensor | None, grad_Q: Tensor | None, T: Tensor, Q: Tensor, gauge: str = "warn") -> Tensor:
    """Cotangent of $A$, given those of its Schur form $T$ and Schur vectors $Q$: $Q (gT + Y) Q^H$.

    Args:
        grad_T: cotangent of $T$, (*, n, n); None for zero. Its part below the diagonal is not read.
        grad_Q: cotangent of $Q$, (*, n, n); None for zero.
        gauge: "warn", "error" or "ignore", for a loss that depends on the phases of the columns of $Q$.

    Returns:
        (*, n, n), complex.

    Raises:
        GaugeError, ValueError: as in `svd_backward`.
    """
    check_gauge(gauge)
    return _pullback(grad_T, grad_Q, T, Q)[0]


@formula
def schur_jvp(A_t: Tensor, T: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of the Schur form $T$ and the Schur vectors $Q$, given that of $A$: $M + T W - W T$ and $Q W$.

    Args:
        A_t: tangent of $A$, (*, n, n), real or complex.

    Returns:
        Two tensors, (*, n, n), complex; the first is upper triangular.
    """
    M = Q.mH @ A_t.to(Q.dtype) @ Q
    W = skew(_solve(T, M))
    return (M + T @ W - W @ T).triu(), Q @ W
