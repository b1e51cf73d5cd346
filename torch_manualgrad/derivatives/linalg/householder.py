"""Products of Householder reflectors: linalg_householder_product and ormqr.

With the columns $v_i$ of $V$, unit lower trapezoidal (*, m, k), and any numbers $tau_i$, real or complex, the product
$Q = H_1 ... H_k$ of $H_i = I - tau_i v_i v_i^H$ has a compact form (Schreiber and Van Loan): with $D = diag(tau)$ and
$U = triu(V^H V, 1)$,

    Q = I - V T V^H,      T = D B = A D,      B = (I + U D)^-1,      A = (I + D U)^-1.

Both inverses are of unit triangular matrices, so $tau_i = 0$, where $H_i = I$, is an ordinary point, and so is a reflector
without an inverse. $Q^H$ is the same with $conj(tau)$ for $tau$ and $U^H$ for $U$. For any $X$, with $b = B V^H X$ and
$dt = d tau$,

    Q X = X - V D b,      dQ X = -dV D b - V A (dt b + D (dV^H X - dU D b)),      dU = triu(dV^H V + V^H dV, 1).

The cotangents of $V$ and $tau$ in $Re tr(L^H Q X)$ are, with $a = A^H V^H L$ and $S = triu(conj(D) a (D b)^H, 1)$,

    gtau_i = -sum_j a_ij conj(b_ij),      gV = V (S + S^H) - L (D b)^H - X (conj(D) a)^H,

without the entries of $gV$ on and above the diagonal, where $V$ is constant. householder_product is $Q [I; 0]$, and
ormqr multiplies by $Q$ or $Q^H$ from either side. Every derivative is a few matrix products and two triangular solves,
instead of a sequence of $k$ small operations.

Args:
    tau_t: tangent of $tau$, (*, k); None for zero.
    tau_p: (*, k), any values.
    left: whether $Q$ multiplies $C$ from the left.
    transpose: whether the factor is $Q^H$.
    tau: (*, k), any values; the reflectors need not be orthogonal.

References:
    Schreiber and Van Loan, SIAM J. Sci. Stat. Comput. 10 (1989) 53; ATen householder_product_backward,
    householder_product_jvp and ormqr_backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from ...core.rule import formula, rule
from .common import leading


def _below(input: Tensor, tau: Tensor) -> Tensor:
    """The part of the input that is read: its first columns, below the diagonal."""
    return leading(input, columns=tau.shape[-1]).tril(-1)


def _reflectors(input: Tensor, tau: Tensor) -> Tensor:
    """$V$, which has ones on the diagonal."""
    V = _below(input, tau)
    return V + torch.eye(*V.shape[-2:], dtype=V.dtype, device=V.device)


def _solve(gram: Tensor, tau: Tensor, X: Tensor, adjoint: bool, before: bool = False) -> Tensor:
    """$B X$, or $A X$ if ``before``; with ``adjoint``, the same for $Q^H$. The solver reads only one triangle of $V^H V$."""
    d = tau.conj() if adjoint else tau
    matrix = gram * d.unsqueeze(-1 if before else -2)
    return solve_triangular(matrix, X, upper=not adjoint, unitriangular=True)


def _scaled(tau: Tensor, X: Tensor, adjoint: bool) -> Tensor:
    """$D X$, or $conj(D) X$."""
    return (tau.conj() if adjoint else tau).unsqueeze(-1) * X


def _apply(V: Tensor, gram: Tensor, tau: Tensor, X: Tensor, adjoint: bool) -> Tensor:
    """$Q X$ or $Q^H X$."""
    return X - V @ _scaled(tau, _solve(gram, tau, V.mH @ X, adjoint), adjoint)


def _pulled_back(V: Tensor, tau: Tensor, VhL: Tensor, VhX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """$(conj(D) a, D b, gtau, S + S^H)$ for $V^H L$ and $V^H X$."""
    gram = V.mH @ V
    a, b = _solve(gram, tau, VhL, True), _solve(gram, tau, VhX, False)
    Da, Db = _scaled(tau, a, True), _scaled(tau, b, False)
    S = (Da @ Db.mH).triu(1)
    return Da, Db, -(a * b.conj()).sum(-1), S + S.mH


def _pushed_forward(
    V: Tensor,
    V_t: Tensor | None,
    gram: Tensor,
    tau: Tensor,
    tau_t: Tensor | None,
    X: Tensor,
    VhX: Tensor,
    adjoint: bool,
) -> Tensor:
    """$dQ X$ or $dQ^H X$."""
    b = _solve(gram, tau, VhX, adjoint)
    Db = _scaled(tau, b, adjoint)
    inner = torch.zeros_like(b) if tau_t is None else _scaled(tau_t, b, adjoint)
    if V_t is None:
        return -(V @ _solve(gram, tau, inner, adjoint, before=True))
    VhV_t = V.mH @ V_t
    U_t = VhV_t + VhV_t.mH
    U_t = U_t.tril(-1) if adjoint else U_t.triu(1)
    inner = inner + _scaled(tau, V_t.mH @ X - U_t @ Db, adjoint)
    return -(V_t @ Db) - V @ _solve(gram, tau, inner, adjoint, before=True)


def _to_input(V_grad: Tensor, input: Tensor) -> Tensor:
    """The cotangent of the input, of which only the first columns below the diagonal are read."""
    V_grad = V_grad.tril(-1)
    return V_grad if V_grad.shape == input.shape else pad(V_grad, (0, input.shape[-1] - V_grad.shape[-1]))


@formula
def householder_product_backward(grad: Tensor, input: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of the reflectors and of $tau$, given that of $H_1 ... H_k [I; 0]$ (see the module).

    There $L = grad$ and $X = [I; 0]$.

    Args:
        grad: cotangent of the product, (*, m, n).
        input: (*, m, n), $m >= n >= k$, real or complex; its first $k$ columns below the diagonal are the reflectors.

    Returns:
        (*, m, n), zero outside of the reflectors; and (*, k).

    References:
        ATen householder_product_backward, which needs every reflector to have an inverse; its ``result`` and
        ``flip_order`` are not needed here.
    """
    V = _reflectors(input, tau)
    n = input.shape[-1]
    Da, Db, tau_grad, S = _pulled_back(V, tau, V.mH @ grad, V[..., :n, :].mH)
    V_grad = V @ S - grad @ Db.mH - pad(Da.mH, (0, 0, 0, V.shape[-2] - n))
    return _to_input(V_grad, input), tau_grad


@formula
def householder_product_jvp(input_t: Tensor | None, tau_t: Tensor | None, input_p: Tensor, tau_p: Tensor) -> Tensor:
    """Tangent of $H_1 ... H_k [I; 0]$: $dQ X$ of the module with $X = [I; 0]$.

    Args:
        input_t: tangent of the input, (*, m, n); None for zero.
        input_p: (*, m, n), $m >= n >= k$, real or complex; its first $k$ columns below the diagonal are the reflectors.

    Returns:
        (*, m, n).

    References:
        ATen householder_product_jvp, whose ``prod`` is not needed here: it would have to be differentiated too.
    """
    V = _reflectors(input_p, tau_p)
    V_t = None if input_t is None else _below(input_t, tau_p)
    X = torch.eye(*input_p.shape[-2:], dtype=V.dtype, device=V.device)
    return _pushed_forward(V, V_t, V.mH @ V, tau_p, tau_t, X, V[..., : input_p.shape[-1], :].mH, False)


@formula
def ormqr_backward(
    grad: Tensor, self: Tensor, tau: Tensor, other: Tensor, left: bool, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the reflectors, $tau$ and $C$, given that of $Q C$, $Q^H C$, $C Q$ or $C Q^H$ (see the module).

    $Q^H C$: $Re tr(g^H Q^H C) = Re tr(C^H Q g)$, so $g$ and $C$ change places. From the right: $C Q = (Q^H C^H)^H$.

    Args:
        grad: cotangent of the result, the shape of ``other``.
        self: (*, q, k), the reflectors below the diagonal, real or complex; $q = m$ if ``left``, else $n$.
        other: $C$, (*, m, n).

    Returns:
        The shapes of ``self``, ``tau`` and ``other``.

    References:
        ATen ormqr_backward, whose ``result`` is not needed here.
    """
    V = _reflectors(self, tau)
    if not left:
        grad, other, transpose = grad.mH, other.mH, not transpose
    L, X = (other, grad) if transpose else (grad, other)
    VhL, VhX = V.mH @ L, V.mH @ X
    Da, Db, tau_grad, S = _pulled_back(V, tau, VhL, VhX)
    self_grad = _to_input(V @ S - L @ Db.mH - X @ Da.mH, self)
    other_grad = grad - V @ (Db if transpose else Da)
    return self_grad, tau_grad, other_grad if left else other_grad.mH


@formula
def ormqr_jvp(
    self_t: Tensor | None,
    tau_t: Tensor | None,
    other_t: Tensor | None,
    self_p: Tensor,
    tau_p: Tensor,
    other_p: Tensor,
    left: bool,
    transpose: bool,
) -> Tensor:
    """Tangent of $Q C$, $Q^H C$, $C Q$ or $C Q^H$: $dQ C + Q dC$ and so on (see the module).

    Args:
        self_t: tangent of the reflectors, the shape of ``self_p``; None for zero.
        other_t: tangent of $C$, (*, m, n); None for zero.
        self_p: (*, q, k), the reflectors below the diagonal, real or complex; $q = m$ if ``left``, else $n$.
        other_p: $C$, (*, m, n).

    Returns:
        The shape of ``other_p``.

    References:
        The adjoint of `ormqr_backward`; ATen has no forward mode here.
    """
    V = _reflectors(self_p, tau_p)
    gram = V.mH @ V
    adjoint = transpose == left
    X = other_p if left else other_p.mH
    total = torch.zeros_like(X)
    if self_t is not None or tau_t is not None:
        V_t = None if self_t is None else _below(self_t, tau_p)
        total = _pushed_forward(V, V_t, gram, tau_p, tau_t, X, V.mH @ X, adjoint)
    if other_t is not None:
        total = total + _apply(V, gram, tau_p, other_t if left else other_t.mH, adjoint)
    return total if left else total.mH


def _ormqr_vjp(
    grad: Tensor, self: Tensor, input2: Tensor, input3: Tensor, left: bool, transpose: bool, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    if any(output_mask[:2]):
        return ormqr_backward(grad, self, input2, input3, left, transpose)
    return None, None, torch.ormqr(self, input2, grad, left, not transpose)


rule(
    "aten::linalg_householder_product",
    vjp={("input", "tau"): householder_product_backward},
    jvp={"result": householder_product_jvp},
    source="ATen householder_product_backward, householder_product_jvp; Schreiber and Van Loan 1989, SIAM SISC 10",
    improves=("values", "speed"),
)
rule(
    "aten::ormqr",
    vjp={("self", "input2", "input3"): _ormqr_vjp},
    jvp={"result": ormqr_jvp.bind(tau_t="input2_t", other_t="input3_t", tau_p="input2_p", other_p="input3_p")},
    source="ATen ormqr_backward; the tangent is its adjoint",
    improves=("missing", "speed"),
)
