"""Norms of singular values: nuclear_norm, spectral_norm.

With $A = W S V^H$, the gradient of the nuclear norm $sum_i s_i$ is the polar factor $W V^H$; its derivative is in
`polar`.

The gradient of the spectral norm $s_1$ is $K = w_1 v_1^H = A Q / s_1$, with $Q = v_1 v_1^H$ the projector onto the
first eigenvector of $B = A^H A$. With $R$ the reduced resolvent, the sum over $j > 1$ of $v_j v_j^H / (s_1^2 - s_j^2)$,
and $mu = s_1^2$,

    dmu = tr(Q dB),   dQ = R dB Q + Q dB R,   dR = R dB R - dmu R^2 - R^2 dB Q - Q dB R^2,

in terms of $Q$ and $R$ again, so that all orders are exact. Only differences from $s_1$ occur: the other singular
values may repeat.

Note:
    Where not differentiable:

    - the nuclear norm, where $A$ does not have full rank: the gradient is the subgradient of least norm, the sum of
    $w_i v_i^H$ over $s_i > 0$, and the higher derivatives are those within the matrices of that rank;
    - the spectral norm, where $s_1 = ... = s_k$: the gradient is the mean of the $k$ gradients $w_i v_i^H$, a subgradient;
    the higher derivatives are those along changes of $A$ that keep the $k$ values equal, and finite along others.

    At $A = 0$ all derivatives of both are 0. Singular values count as equal, or as 0, up to rounding,
    $max(m, n) eps s_1$.

References:
    Watson, Linear Algebra Appl. 170 (1992) 33; Kato, Perturbation Theory for Linear Operators, section II.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import checked
from ..derivatives.linalg.smooth import hermitian, smooth, svd
from .arguments import matrix
from .polar import polar_factor

__all__ = ["nuclear_norm", "spectral_norm"]


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    """$Re tr(X^H Y)$, with the two dims kept."""
    product = X.conj() * Y
    return (product.real if product.is_complex() else product).sum((-2, -1), keepdim=True)


def _rounding(A: Tensor, S: Tensor) -> Tensor:
    return S[..., :1] * (max(A.shape[-2:]) * torch.finfo(S.dtype).eps)


# -- nuclear norm ---------------------------------------------------------------------------------------------------


def _sum_vjp(needed: Any, inputs: Any, output: Tensor, grad: Tensor) -> dict[str, Tensor]:
    return {"A": grad * polar_factor(*inputs, False)}


def _sum_jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    return None if tangents.A is None else _inner(polar_factor(*inputs, False), tangents.A)


@smooth(vjp=_sum_vjp, jvp=_sum_jvp)
def singular_value_sum(A: Tensor, W: Tensor, S: Tensor, V: Tensor) -> Tensor:
    """The sum of the singular values of $A = W diag(S) V^H$.

    Args:
        A: as in `polar_factor`.
        W: as in `polar_factor`; columns that belong to $s_i = 0$ are replaced by 0.
        S: as in `polar_factor`.
        V: as in `polar_factor`.

    Returns:
        (*, 1, 1), real.

    Note:
        Where not differentiable: see the module's docstring.

    References:
        Watson, Linear Algebra Appl. 170 (1992) 33.
    """
    return S.sum(-1)[..., None, None]


# -- spectral norm --------------------------------------------------------------------------------------------------


def _projector_vjp(needed: Any, inputs: Any, outputs: Any, gQ: Tensor | None, gR: Tensor | None) -> dict[str, Tensor]:
    # dB -> dR is self-adjoint except for -dmu R^2, whose adjoint gives -<gR, R^2> Q / k
    Q, R = outputs
    found = []
    if gQ is not None:
        found.append(R @ gQ @ Q + Q @ gQ @ R)
    if gR is not None:
        R2 = R @ R
        found.append(R @ gR @ R - _inner(gR, R2) * Q / _rank(inputs) - R2 @ gR @ Q - Q @ gR @ R2)
    return {"B": found[0] if len(found) == 1 else found[0] + found[1]}


def _projector_jvp(inputs: Any, outputs: Any, tangents: Any) -> tuple[Tensor | None, Tensor | None]:
    dB = tangents.B
    if dB is None:
        return None, None
    Q, R = outputs
    R2 = R @ R
    dmu = _inner(Q, dB) / _rank(inputs)
    return R @ dB @ Q + Q @ dB @ R, R @ dB @ R - dmu * R2 - R2 @ dB @ Q - Q @ dB @ R2


def _rank(inputs: Any) -> Tensor:
    return inputs.first.sum(-1)[..., None, None]


@smooth(vjp=_projector_vjp, jvp=_projector_jvp)
def first_projector(B: Tensor, S: Tensor, V: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """$Q$ and $R$ of the module's docstring, for $B = V diag(S^2) V^H$ with $S_1 = 1$.

    Args:
        B: Hermitian, (*, n, n). Its value is not read.
        S: (*, n), a constant to every derivative.
        V: (*, n, n), unitary; constant.
        first: (*, n): 1 for the singular values that are equal to $S_1$, 0 for the others; constant.

    Returns:
        $Q$ and $R$, (*, n, n). $Q$ has rank $k$, the number of singular values equal to $S_1$.

    Note:
        Where not differentiable: for $k > 1$; the derivative is that along changes that keep the $k$ eigenvalues equal.

    References:
        Kato, Perturbation Theory for Linear Operators, II-(2.14) and I-(5.32).
    """
    apart = torch.where(first == 0, (1 - S) * (1 + S), 1)
    resolvent = (1 - first) / apart
    return (V * first.unsqueeze(-2)) @ V.mH, (V * resolvent.unsqueeze(-2)) @ V.mH


def _first_gradient(inputs: Any, norm: Tensor) -> Tensor:
    """$K$, from $A$ and $s_1$ divided by the value of $s_1$ as a constant, so that no square overflows."""
    A, S, V, first = inputs
    scale = S[..., :1, None]
    scale = torch.where(scale == 0, 1, scale)
    A, S, norm = A / scale, S / scale.squeeze(-1), norm / scale
    Q, _ = first_projector(hermitian(A.mH @ A), S, V, first)
    vanishing = S[..., :1, None] == 0
    return torch.where(vanishing, 0, A @ Q) / (torch.where(vanishing, 1, norm) * first.sum(-1)[..., None, None])


def _largest_vjp(needed: Any, inputs: Any, norm: Tensor, grad: Tensor) -> dict[str, Tensor]:
    return {"A": grad * _first_gradient(inputs, norm)}


def _largest_jvp(inputs: Any, norm: Tensor, tangents: Any) -> Tensor | None:
    return None if tangents.A is None else _inner(_first_gradient(inputs, norm), tangents.A)


@smooth(vjp=_largest_vjp, jvp=_largest_jvp)
def largest_singular_value(A: Tensor, S: Tensor, V: Tensor, first: Tensor) -> Tensor:
    """The largest singular value of $A$.

    Args:
        A: (*, m, n), $m >= n >= 1$. Its value is not read.
        S: its singular values, descending, (*, n); constant.
        V: its right singular vectors, (*, n, n); constant.
        first: as in `first_projector`.

    Returns:
        (*, 1, 1), real.

    Note:
        Where not differentiable: see the module's docstring.

    References:
        Watson, Linear Algebra Appl. 170 (1992) 33; Kato, Perturbation Theory for Linear Operators, section II.2.
    """
    return S[..., :1, None].clone()


# -- public functions -----------------------------------------------------------------------------------------------


@checked
def nuclear_norm(A: Tensor, keepdim: bool = False) -> Tensor:
    """The sum of the singular values; exact derivatives also where they repeat.

    Args:
        A: (*, m, n), real or complex.
        keepdim: return (*, 1, 1) instead of (*).

    Returns:
        (*), real. The gradient is the polar factor of $A$.

    Raises:
        TypeError: $A$ is neither floating point nor complex.
        ValueError: $A$ is not a matrix.

    Note:
        Where not differentiable: where $A$ does not have full rank: the gradient is the subgradient of least norm, and the
        higher derivatives are those within the matrices of that rank. At $A = 0$ all derivatives are 0.

    References:
        Watson, Linear Algebra Appl. 170 (1992) 33.
    """
    A = matrix(A, "A")
    if A.shape[-2] < A.shape[-1]:
        A = A.mH
    W, S, V = svd(A)
    zero = S <= _rounding(A, S)
    norm = singular_value_sum(A, W * ~zero.unsqueeze(-2), S, V)
    return norm if keepdim else norm[..., 0, 0]


@checked
def spectral_norm(A: Tensor, keepdim: bool = False) -> Tensor:
    """The largest singular value; exact derivatives also where others repeat, and a subgradient where the largest repeats.

    Args:
        A: (*, m, n), real or complex.
        keepdim: return (*, 1, 1) instead of (*).

    Returns:
        (*), real; 0 for an empty matrix.

    Raises:
        TypeError: $A$ is neither floating point nor complex.
        ValueError: $A$ is not a matrix.

    Note:
        Where not differentiable: where the largest singular value has multiplicity $k > 1$: the gradient is the mean of
        the $k$ gradients $w_i v_i^H$, a subgradient, and the higher derivatives are those along changes that keep the
        $k$ values equal. At $A = 0$ all derivatives are 0.

    References:
        Watson, Linear Algebra Appl. 170 (1992) 33; Kato, Perturbation Theory for Linear Operators, section II.2.
    """
    A = matrix(A, "A")
    if A.shape[-2] < A.shape[-1]:
        A = A.mH
    if A.shape[-1] == 0:
        norm = A.abs().sum((-2, -1), keepdim=True)
    else:
        _, S, V = svd(A)
        first = (S >= S[..., :1] - _rounding(A, S)).to(S.dtype)
        norm = largest_singular_value(A, S, V, first)
    return norm if keepdim else norm[..., 0, 0]
