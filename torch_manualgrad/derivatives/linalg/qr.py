"""Derivatives of the QR factorisation A = Q R.

A is (*, m, n), Q is (*, m, w) with orthonormal columns, R is (*, w, n) upper triangular; LAPACK makes its diagonal real.
Write Omega = Q^H dQ, skew-Hermitian, and N = Q^H dA_c R_c^-1, where the index c stands for the leading columns that
determine Q: min(m, n) of them, or m - 1 if A is real and m <= n, as the last column of Q is then known but for its
sign, which LAPACK keeps. The lower triangle of N is that of Omega, because dR R^-1 is upper triangular; a phase of a
column of Q that would make R's diagonal complex is not allowed, so that with phi(N) = tril(N) with half of the diagonal

    Omega = phi(N) - phi(N)^H                                  (what N does not reach is zero),
    dQ = (dA_c R_c^-1 - Q N) + Q Omega,      dR = triu(dQ^H A + Q^H dA).

Pulled back, with G = gQ + A gR^H, K = Q^H G and W = phi(K - K^H):

    gA = Q gR,      gA_c += (G - Q (K - W))_c R_c^-H.

The products with A, where Q and R would do, keep both right to every order at a matrix without full rank: they hold of
the leading columns of Q and rows of R by themselves, which are all that is left there (next paragraph).

Undefined derivatives. If R_jj is zero to rounding, beside the norm of column j, and j is one of the columns c, then
the columns of Q and the rows of R from j on depend on a choice and jump under a perturbation. Their tangents are nan;
so is the gradient, if their cotangents are not exactly zero. Everything before them is smooth, and its derivatives are
right. Where all that the leading columns leave of A are rounding errors, a loss of Q R is smooth, too: see qr_rounding.py. Traced
graphs, and sharded matrices in second order, have nan there.

With mode "complete" and m > n the last m - n columns of Q are any orthonormal basis of the complement of the others.
The derivative is that of the basis which turns no more than it must (Q_2^H dQ_2 = 0): right for every loss that
depends on them through their span only, as Q_2 Q_2^H. A loss that depends on the choice of the basis has no derivative,
and is reported (see gauge.py).
With mode "r" the forward keeps no Q; it is computed anew.

Args:
    Q: what the forward returned, (*, m, w), or (0,) with mode "r".
    R: (*, w, n), what the forward returned; w = min(m, n), or m with mode "complete".
    mode: "reduced", "complete" or "r".

References:
    ATen linalg_qr_backward and linalg_qr_jvp, which have neither mode "r" nor the last columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from ...core.libraries import kernel_limit
from ...core.rule import CompiledVjp, Kernel, formula, rule
from .common import LARGEST, eye_like, phi, small
from .gauge import depends_on_basis, report
from .qr_full_rank import full_rank_backward, full_rank_jvp, leading, vanishing, where_deficient
from .qr_rounding import may_be_left_by_rounding, qr_rounding_backward, qr_rounding_jvp
from .undefined import nan_unless_zero

# Up to which order the CPU kernel for single real square matrices is faster than BLAS, by measurement.
_IN_CACHE = kernel_limit("cached_order")


def _with_Q(A: Tensor, Q: Tensor, mode: str) -> Tensor:
    """Q, computed anew where the forward keeps none."""
    if mode not in ("reduced", "complete", "r"):
        raise RuntimeError(f"mode: expected 'reduced', 'complete' or 'r', got {mode!r}")
    return torch.linalg.qr(A)[0] if mode == "r" else Q


def _well_defined(A: Tensor, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(which columns of Q are undefined, Q with zeros there, R_c with the identity there)."""
    c = leading(A)
    R = R[..., :c, :c]
    undefined = pad(vanishing(max(A.shape[-2:]), R), (0, Q.shape[-1] - c)).cumsum(-1) > 0
    columns = undefined.unsqueeze(-2)
    return undefined, torch.where(columns, 0, Q), torch.where(columns[..., :c], eye_like(R), R)


def _nan(x: Tensor, undefined: Tensor) -> Tensor:
    """x, with nan where it is undefined."""
    return nan_unless_zero(x + torch.where(undefined, math.nan, 0).to(x.dtype), undefined)


def _where_defined(grad_Q: Tensor | None, grad_R: Tensor | None, A: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    """gA of the module's docstring: nan, unless every cotangent of what is undefined is zero."""
    undefined, Q, R_c = _well_defined(A, Q, R)
    c = R_c.shape[-1]
    G = torch.zeros_like(Q) if grad_Q is None else nan_unless_zero(grad_Q, undefined.unsqueeze(-2))
    if grad_R is not None:
        grad_R = nan_unless_zero(grad_R.triu(), undefined.unsqueeze(-1))
        G = G + A @ grad_R.mH
    K = Q.mH @ G
    W = phi(K - K.mH)
    grad_A = solve_triangular(R_c.mH, (G - Q @ (K - W))[..., :c], upper=False, left=False)
    grad_A = pad(grad_A, (0, A.shape[-1] - c))
    if grad_R is not None:
        grad_A = grad_A + Q @ grad_R
    return grad_A


def _from_factors(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """The backward without A, with a cotangent and no more columns than rows, and whether it is undefined anywhere."""
    grad_A = _where_defined(grad_Q, grad_R, Q @ R, Q, R).mT.contiguous().mT
    return grad_A, grad_A.isnan().any()


def _backward_by_rank(
    compiled: Callable[..., tuple[Tensor, Tensor]],
    grad_Q: Tensor | None,
    grad_R: Tensor | None,
    A: Tensor,
    Q: Tensor,
    R: Tensor,
    mode: str,
) -> Tensor | None:
    """`linalg_qr_backward` by the kernel, or by the shorter formula where the rank is full; and what it reports."""
    m, n = A.shape[-2:]
    if mode == "complete" and m > n and grad_Q is not None:
        report(depends_on_basis(Q[..., n:], grad_Q[..., n:]), "warn", "derivative of the QR factorisation")
    if not A.is_cpu:  # to ask for the rank would synchronize
        return None
    if Q.shape[-1] == n and small(Q, m, in_cache=_IN_CACHE):
        grad_A, undefined = compiled(grad_Q, grad_R, Q, R)
        if not undefined:
            return grad_A

    def again(*tensors: Tensor | None) -> tuple[Tensor]:
        return (linalg_qr_backward.reference(*tensors, mode),)

    full = full_rank_backward(grad_Q, grad_R, Q, R, leading(A))
    found = where_deficient((full,), A, R, again, grad_Q, grad_R, A, Q, R)
    return found if found is None else found[0]


@formula(
    kernels=Kernel(
        "cpu",
        when=lambda grad_Q, grad_R, mode: mode in ("reduced", "complete") and not (grad_Q is None and grad_R is None),
        compiled=_from_factors,
        python=_backward_by_rank,
        tracked=True,
    )
)
def linalg_qr_backward(
    grad_Q: Tensor | None, grad_R: Tensor | None, A: Tensor, Q: Tensor, R: Tensor, mode: str
) -> Tensor:
    """Cotangent of A, given those of Q and R: Q gR, and (G - Q (K - W))_c R_c^-H in the leading columns (see the module).

    Args:
        grad_Q: cotangent of Q, (*, m, w), or (0,) with mode "r", where it is not used; None for zero.
        grad_R: cotangent of R, (*, w, n); None for zero. What is below its diagonal has no effect.
        A: (*, m, n), real or complex.

    Returns:
        (*, m, n), column-major.

    Raises:
        RuntimeError: another mode.

    Note:
        Where not differentiable: zero pivots: nan, unless every cotangent of what is undefined is zero, or the loss is one of
        Q R and rounding errors are all that the leading columns leave. With mode
        "complete" and m > n, the derivative of the span of the last columns of Q; with a GaugeWarning if the loss
        depends on more.

    References:
        ATen linalg_qr_backward, which has neither mode "r" nor the last columns.
    """
    Q = _with_Q(A, Q, mode)
    grad_Q = None if mode == "r" else grad_Q
    grad_A = _where_defined(grad_Q, grad_R, A, Q, R)
    if (grad_Q is not None or grad_R is not None) and may_be_left_by_rounding(Q, R, leading(A)):
        of_product, settled = qr_rounding_backward(grad_Q, grad_R, Q, R, leading(A))
        grad_A = torch.where(settled[..., None, None], of_product, grad_A)
    return grad_A.mT.contiguous().mT


def _jvp_by_rank(A_t: Tensor, A_p: Tensor, Q: Tensor, R: Tensor, mode: str) -> tuple[Tensor, ...] | None:
    """`linalg_qr_jvp` by the shorter formula where the rank is full."""

    def again(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return linalg_qr_jvp.reference(*tensors, mode)

    return where_deficient(full_rank_jvp(A_t, Q, R), A_p, R, again, A_t, A_p, Q, R)


@formula(kernels=Kernel("cpu", when=lambda mode: mode in ("reduced", "complete"), python=_jvp_by_rank))
def linalg_qr_jvp(A_t: Tensor, A_p: Tensor, Q: Tensor, R: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Tangents of Q and R: dQ = dA_c R_c^-1 - Q (N - Omega), dR = triu(dQ^H A + Q^H dA) (see the module).

    Args:
        A_t: tangent of A, (*, m, n).
        A_p: A, (*, m, n), real or complex.

    Returns:
        The tangents, of the shapes of ``Q`` and ``R``, row-major. With mode "r" the first is zero.

    Raises:
        RuntimeError: another mode.

    Note:
        Where not differentiable: zero pivots: nan from there on, in the columns of Q and the rows of R; with a GaugeWarning if
        rounding errors are all that the leading columns leave, as the tangent of Q R is then right. With mode
        "complete" and m > n, the last columns of Q do not turn within their span.

    References:
        ATen linalg_qr_jvp, which has neither mode "r" nor the last columns.
    """
    Q_r = _with_Q(A_p, Q, mode)
    undefined, Q_p, R_c = _well_defined(A_p, Q_r, R)
    c, w = R_c.shape[-1], Q_p.shape[-1]
    Y = pad(solve_triangular(R_c, A_t[..., :c], upper=True, left=False), (0, w - c))
    N = Q_p.mH @ Y
    lower = phi(N)
    Q_t = Y - Q_p @ (N - lower + lower.mH)
    R_t = Q_t.mH @ A_p + Q_p.mH @ A_t
    R_t = _nan(R_t, undefined.unsqueeze(-1)).triu()
    Q_t = _nan(Q_t, undefined.unsqueeze(-2))
    Q_s, R_s, settled = qr_rounding_jvp(A_t, Q_r, R, c)
    Q_t = torch.where(settled.unsqueeze(-2), Q_s, Q_t)
    R_t = torch.where(settled.unsqueeze(-1), R_s, R_t)
    Q_t = torch.zeros_like(Q) if mode == "r" else Q_t
    return Q_t.contiguous(), R_t.contiguous()


rule(
    "aten::linalg_qr",
    vjp={"A": linalg_qr_backward},
    compiled_vjp=CompiledVjp(
        "A", linalg_qr_backward, {}, LARGEST, only={"mode": "reduced"}, square=("R",), declines=True
    ),
    jvp={("Q", "R"): linalg_qr_jvp},
    source="ATen linalg_qr_backward, linalg_qr_jvp",
    improves=("values", "missing"),
)
