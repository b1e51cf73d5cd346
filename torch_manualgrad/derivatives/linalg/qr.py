"""The QR factorization $A = Q R$: linalg_qr.

$A$ is (*, m, n), $Q$ is (*, m, w) with orthonormal columns, $R$ is (*, w, n) upper triangular; LAPACK makes its
diagonal real. Write $Omega = Q^H dQ$, skew-Hermitian, and $N = Q^H dA_c R_c^-1$, where the index $c$ denotes the
leading columns that determine $Q$: $min(m, n)$ of them, or $m - 1$ if $A$ is real and $m <= n$, because the last column of
$Q$ is then known up to its sign, which LAPACK keeps. The lower triangle of $N$ is that of $Omega$, because $dR R^-1$ is
upper triangular. Phases of the columns of $Q$ that would make the diagonal of $R$ complex are not allowed. So, with
$phi(N)$ the lower triangle of $N$ with half of the diagonal,

    $Omega = phi(N) - phi(N)^H$                                  (zero in the columns that $N$ lacks),
    $dQ = (dA_c R_c^-1 - Q N) + Q Omega$,      $dR = triu(dQ^H A + Q^H dA)$.

Pulled back, with $G = gQ + A gR^H$, $K = Q^H G$ and $W = phi(K - K^H)$:

    gA = Q gR,      gA_c += (G - Q (K - W))_c R_c^-H.

The products contain $A$ instead of $Q R$, so both formulas are right to every order at a matrix without full rank: they hold
for the leading columns of $Q$ and rows of $R$ alone, and nothing else is defined there (next paragraph). With full rank,
$Q R$ replaces $A$, $W - K$ does not need all of $K$, and the formulas are shorter.

Undefined derivatives. If $|R_jj| <= max(m, n) eps sum_i |R_ij|$, and $j$ is one of the columns $c$, then the columns of
$Q$ and the rows of $R$ from $j$ on depend on a choice and jump under a perturbation. Their tangents are nan; so is the
gradient, if their cotangents are not exactly zero. Everything before them is smooth, and its derivatives are right.

Dependent columns. If the rank is $p < n$ and the $p$ leading columns are independent, the rows of $R$ from $p$ on are
rounding errors (at most 16 times that bound), and the columns of $Q$ from $p$ on are determined by these errors. A loss
of $Q R$, such as a reconstruction, is still smooth. Its cotangent of column $j$ of $Q$ is proportional to $R_jj$. So
the quotient has all of its digits although $R_jj$ has none, as long as nothing of another scale is added; the formulas
for full rank keep the scales apart. If $R_jj$ is so much smaller than its row that less than half of the digits remain,
the result is nan. A loss that depends on these columns alone has a quotient as large as $1 / R_jj$, a thousand times
what its cotangents account for, and no derivative; the result is nan. Where $R_jj$ is exactly zero, the cotangent of
column $j$ of $Q$, $G R^H$ with $G$ the gradient, is zero, and the cotangent of $R$ has the rest of $G$ only down to the
diagonal. The cotangents do not determine column $j$ of $G$, and it is nan. For a tangent, the loss is not known: the
result of the formulas is returned, with a GaugeWarning. A second derivative divides by $R_jj$ twice, has no correct
digit, and is nan. Traced graphs, and sharded matrices in second order, return nan in all these cases.

With mode "complete" and $m > n$, the last $m - n$ columns of $Q$ are any orthonormal basis of the complement of the
others. The derivative is that of the basis that rotates as little as possible $(Q_2^H dQ_2 = 0)$. It is right for every loss
that depends on these columns only through their span, such as a loss of $Q_2 Q_2^H$. A loss that depends on the choice of the
basis has no derivative, and is reported (see gauge.py). With mode "r" the forward returns no $Q$, so it is recomputed.

Args:
    Q: as the forward returned it, (*, m, w), or (0,) with mode "r".
    R: (*, w, n), as the forward returned it; $w = min(m, n)$, or $m$ with mode "complete".
    mode: "reduced", "complete" or "r".
    c: the number of columns of $A$ that determine $Q$.
    A_t: tangent of $A$, (*, m, n).

References:
    ATen linalg_qr_backward and linalg_qr_jvp, which have neither mode "r" nor the last columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.core.limits import LIMITS
from torch_manualgrad.core.rule import CompiledVjp, Formula, Kernel, formula, is_sharded, readable, rule

from ..terms import total
from .common import LARGEST, eye_like, phi, skew, small, sym
from .gauge import depends_on_basis, report

_IN_CACHE = kernel_limit("cached_order")

# -- with full rank ---------------------------------------------------------------------------------------------------

# Products with triangles are computed by blocks from this order on.
_BLOCK = LIMITS["qr_block"]


def _determining(A: Tensor) -> int:
    """The number of columns of $A$ that determine $Q$."""
    m, n = A.shape[-2:]
    return min(m, n) if m > n or A.is_complex() else max(m - 1, 0)


# The kernels decide by the same rules: csrc/math/qr_rank.h, and is_regular() in csrc/linalg/qr.cpp. Change all of them.
def _vanishing(order: int, R: Tensor) -> Tensor:
    """Which pivots of a leading part of $R$ are zero to rounding, relative to a sum of moduli, as squares may overflow.

    Args:
        order: the larger dimension of $A$.
    """
    rounding = order * torch.finfo(R.dtype).eps
    return R.diagonal(dim1=-2, dim2=-1).abs() <= (R.triu().abs() * rounding).sum(-2)


def _where_deficient(
    results: tuple[Tensor, ...],
    A: Tensor,
    R: Tensor,
    again: Callable[..., tuple[Tensor, ...]],
    *tensors: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """The results, with those of ``again`` for matrices with a vanishing pivot; None if all matrices have one."""
    c = _determining(A)
    deficient = _vanishing(max(A.shape[-2:]), R[..., :c, :c]).any(-1)
    if not deficient.any():
        return results
    if deficient.all():
        return None
    for result, right in zip(results, again(*[x if x is None else x[deficient] for x in tensors])):
        result[deficient] = right
    return results


def _subtract_outer(M: Tensor, S: Tensor, R: Tensor) -> None:
    """$M -= S R^H$ for the upper triangles $S$ and $R$, (*, m, n), in place."""
    m, n = R.shape[-2:]
    step = max(_BLOCK, -(-m // 4))
    for begin in range(0, m, step):
        end = min(begin + step, m)
        columns = slice(begin, end if end < m else n)
        M[..., :end, :end].sub_(S[..., :end, columns] @ R[..., :end, columns].mH)


def _divide(W: Tensor, R: Tensor) -> None:
    """$W$ becomes $W R^-H$, for a lower triangular $W$, in place."""
    n = R.shape[-1]
    if n < 2 * _BLOCK:
        W.copy_(solve_triangular(R.mH, W, upper=False, left=False))
        return
    half = n // 2
    lower = W[..., half:, half:]
    _divide(lower, R[..., half:, half:])
    W[..., half:, :half].sub_(lower @ R[..., :half, half:].mH)
    _divide(W[..., :half], R[..., :half, :half])


def _full_rank_backward(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int) -> Tensor:
    """`linalg_qr_backward` with a cotangent: $M = Q^H gQ - gR R^H$ is smaller than $K$, and has the same $K - K^H$.

    For a matrix without full rank, the result is meaningless.

    Args:
        c: the number of columns of $A$ that determine $Q$.
    """
    M = Q.new_zeros(*Q.shape[:-2], Q.shape[-1], Q.shape[-1]) if grad_Q is None else Q.mH @ grad_Q
    upper = torch.zeros_like(R) if grad_R is None else grad_R.triu()
    if grad_R is not None:
        _subtract_outer(M, upper, R)
    if Q.shape[-1] < Q.shape[-2]:
        # G - Q (K - W) = gQ - Q (M - W), and M - W is Hermitian, with the upper triangle of M
        G = Q @ sym(phi(M.mH))
        return solve_triangular(R.mH, -G if grad_Q is None else grad_Q - G, upper=False, left=False)
    # Q is square, and G - Q K is zero
    W = phi(skew(M)) if M.is_complex() else skew(M).tril(-1)
    inner = W[..., :c]
    _divide(inner, R[..., :c, :c])
    upper[..., :c].add_(inner)
    return (upper.mT @ Q.mT).mT


def _full_rank_jvp(A_t: Tensor, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """`linalg_qr_jvp` without $A$: $dR = (N - Omega) R$, or $Q^H dA - Omega R$ if $Q$ is square."""
    m, p = Q.shape[-2], min(A_t.shape[-2:])
    R_1 = R[..., :p, :p]
    if Q.shape[-1] < m:
        Y = solve_triangular(R_1, A_t, upper=True, left=False)
        upper = phi(sym(Q.mH @ Y)).mH
        return (Y - Q @ upper).contiguous(), upper @ R
    QhA_t = Q.mH @ A_t
    N = solve_triangular(R_1, QhA_t[..., :p], upper=True, left=False)
    omega = skew(phi(pad(N, (0, m - p))) if N.is_complex() else pad(N, (0, m - p)).tril(-1))
    return Q @ omega, (QhA_t - omega @ R).triu()


# -- where rounding errors are left -----------------------------------------------------------------------------------


@formula(kernel=("default",))
def nan_unless_zero(x: Tensor, undefined: Tensor) -> Tensor:
    """$x$, with nan in its undefined entries that are not zero: a derivative that is valid only if the loss ignores them.

    The function is linear, and is its own adjoint and derivative.

    Args:
        x: any shape and dtype.
        undefined: bool, broadcasts to ``x``.

    Returns:
        The shape and dtype of ``x``.

    Note:
        Where not differentiable: nowhere. A product with nan would make a cotangent of zero nan.

    References:
        The derivative of an undefined quantity in a loss that does not depend on it.
    """
    return x * torch.where(undefined & (x != 0), math.nan, 1).to(x.dtype)


nan_unless_zero.impl_save_for_backward(lambda inputs, output: inputs.undefined)
nan_unless_zero.impl_backward(lambda ctx, undefined, grad: {"x": nan_unless_zero(grad, undefined), "undefined": None})
nan_unless_zero.impl_jvp(lambda inputs, output, tangents: nan_unless_zero(tangents.x, inputs.undefined))


_WHAT = "derivative of the QR factorization of a matrix without full rank"

# The largest ratio of the gradient in a dependent column to what the cotangents explain.
_MODERATE = 1e3
# Entries of R up to this multiple of the bound for zero pivots count as rounding errors.
_NOISE = 16


def _left_by_rounding(Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Which matrices have rounding errors left, (*), and in which rows of $R$ and columns of $Q$, (*, w)."""
    order = max(Q.shape[-2], R.shape[-1])
    after = _vanishing(order, R[..., :c, :c]).cumsum(-1) > 0
    dependent = after[..., -1] if c else after.any(-1)
    after = torch.cat([after, dependent.unsqueeze(-1).expand(*after.shape[:-1], R.shape[-2] - c)], -1)
    size = R.triu().abs()
    eps = torch.finfo(R.dtype).eps
    is_noise = (size <= size.sum(-2, keepdim=True) * (_NOISE * order * eps)).all(-1)
    pivots = size.diagonal(dim1=-2, dim2=-1)[..., :c]
    precise = (pivots != 0) & (size[..., :c, :] * eps**0.5 <= pivots.unsqueeze(-1)).all(-1)
    return dependent & (is_noise | ~after).all(-1) & (precise | ~after[..., :c]).all(-1), after


def _may_be_left_by_rounding(Q: Tensor, R: Tensor, c: int) -> bool:
    """Whether some matrix may have rounding errors left. False if distributed or traced: a graph would compute both cases."""
    known = readable(R)
    if known is False or is_sharded(R):
        return False
    return known is None or bool(_vanishing(max(Q.shape[-2], R.shape[-1]), R[..., :c, :c]).any())


def _is_needed(grad_Q: Tensor | None, grad_R: Tensor | None, after: Tensor) -> Tensor:
    """Whether the loss depends on undefined rows or columns, (*)."""
    needed = torch.zeros_like(after[..., 0])
    if grad_Q is not None:
        needed = needed | ((grad_Q != 0) & after.unsqueeze(-2)).any(-1).any(-1)
    if grad_R is not None:
        needed = needed | ((grad_R.triu() != 0) & after.unsqueeze(-1)).any(-1).any(-1)
    return needed


def _is_moderate(grad_A: Tensor, grad_Q: Tensor | None, grad_R: Tensor | None, R: Tensor, after: Tensor) -> Tensor:
    """Whether the gradient in the dependent columns is no larger than the other cotangents explain, (*)."""
    columns = grad_A.abs().amax(-2)
    dependent = pad(after, (0, max(0, columns.shape[-1] - after.shape[-1])), value=True)[..., : columns.shape[-1]]
    size = torch.zeros_like(columns[..., 0])
    if grad_R is not None:
        size = size + grad_R.triu().abs().amax((-2, -1))
    if grad_Q is not None:
        k = min(R.shape[-2:])
        pivots = torch.where(after[..., :k], math.inf, R.diagonal(dim1=-2, dim2=-1).abs())
        size = size + (grad_Q[..., :k].abs().amax(-2) / pivots).amax(-1)
    return torch.where(dependent, columns, 0).amax(-1) <= _MODERATE * size


def _undefined(settled: Tensor, given: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """The sum over ``given`` of nan for settled matrices where ``given`` is not zero, else 0; linear in each of them."""
    settled = (settled.any(-1) if settled.dim() == like.dim() - 1 else settled)[..., None, None]
    return total(
        *[
            nan_unless_zero(torch.where(settled, x, 0), settled).sum((-2, -1), keepdim=True).expand(like.shape)
            for x in given
            if x is not None
        ]
    )


def _without_derivative(op: Formula, inputs: Sequence[str]) -> None:
    """Make every derivative of a formula nan for settled matrices, unless it is zero.

    Args:
        op: a formula. Its last result marks the settled matrices, or columns of them.
        inputs: the names of its tensor arguments.
    """

    @op.impl_vmap
    def _(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        """The batch is one more leading dim."""
        front = [
            x
            if not isinstance(x, Tensor)
            else x.unsqueeze(0).expand(info.batch_size, *x.shape)
            if d is None
            else x.movedim(d, 0)
            for x, d in zip(args, in_dims)
        ]
        found = op(*front)
        return found, (0,) * len(found)

    @op.impl_save_for_backward
    def _(given: Any, output: Any) -> Any:
        return [getattr(given, name) for name in inputs], output[-1]

    @op.impl_backward
    def _(ctx: Any, saved: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
        tensors, settled = saved
        return {name: None if x is None else _undefined(settled, grads[:-1], x) for name, x in zip(inputs, tensors)}

    @op.impl_jvp
    def _(given: Any, output: Any, tangents: Any) -> tuple[Tensor | None, ...]:
        directions = [getattr(tangents, name) for name in inputs]
        return (*[_undefined(output[-1], directions, x) for x in output[:-1]], None)


@formula(kernel=("default",))
def qr_rounding_backward(
    grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int
) -> tuple[Tensor, Tensor]:
    """Cotangent of $A$, given those of $Q$ and $R$, where the loss is smooth although $A$ does not have full rank.

    Args:
        Q: (*, m, w), with orthonormal columns.
        grad_Q: cotangent of $Q$, (*, m, w); None for zero.
        grad_R: cotangent of $R$, (*, w, n); None for zero.

    Returns:
        (*, m, n), and a bool, (*), that marks the matrices for which this is the cotangent.

    Note:
        Where not differentiable: everywhere; a derivative of it is nan.
    """
    settled, after = _left_by_rounding(Q, R, c)
    settled = settled & _is_needed(grad_Q, grad_R, after)
    grad_A = _full_rank_backward(grad_Q, grad_R, Q, R, c)
    return grad_A.contiguous(), settled & _is_moderate(grad_A, grad_Q, grad_R, R, after)


@qr_rounding_backward.impl("default")
def _(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor]:
    if Q.is_cpu and not (settled := _left_by_rounding(Q, R, c)[0]).any():
        return Q.new_zeros(*Q.shape[:-1], R.shape[-1]), settled
    return qr_rounding_backward.reference(grad_Q, grad_R, Q, R, c)


_without_derivative(qr_rounding_backward, ("grad_Q", "grad_R", "Q", "R"))


@formula(kernel=("default",))
def qr_rounding_jvp(A_t: Tensor, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of $Q$ and $R$ where $A$ does not have full rank, and rounding errors are left.

    Args:
        Q: (*, m, w), with orthonormal columns.

    Returns:
        The tangents, of the shapes of ``Q`` and ``R``, and a bool, (*, w), that marks the columns of $Q$ and rows of $R$ for
        which these are the tangents.

    Note:
        Where not differentiable: everywhere; a derivative of it is nan.
    """
    settled, after = _left_by_rounding(Q, R, c)
    return (*_full_rank_jvp(A_t, Q, R), settled.unsqueeze(-1) & after)


@qr_rounding_jvp.impl("default")
def _(A_t: Tensor, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    settled, after = _left_by_rounding(Q, R, c)
    settled = settled.unsqueeze(-1) & after
    if Q.is_cpu and not settled.any():
        return torch.zeros_like(Q).contiguous(), torch.zeros_like(R).contiguous(), settled
    report(settled.any(), "warn", _WHAT)
    Q_t, R_t = _full_rank_jvp(A_t, Q, R)
    return Q_t.contiguous(), R_t.contiguous(), settled


_without_derivative(qr_rounding_jvp, ("A_t", "Q", "R"))


# -- Q and R ----------------------------------------------------------------------------------------------------------


def _with_Q(A: Tensor, Q: Tensor, mode: str) -> Tensor:
    """$Q$, computed again if the forward returned none."""
    if mode not in ("reduced", "complete", "r"):
        raise RuntimeError(f"mode: expected 'reduced', 'complete' or 'r', got {mode!r}")
    return torch.linalg.qr(A)[0] if mode == "r" else Q


def _well_defined(A: Tensor, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which columns of $Q$ are undefined, $Q$ with zeros there, and $R_c$ with the identity there."""
    c = _determining(A)
    R = R[..., :c, :c]
    undefined = pad(_vanishing(max(A.shape[-2:]), R), (0, Q.shape[-1] - c)).cumsum(-1) > 0
    columns = undefined.unsqueeze(-2)
    return undefined, torch.where(columns, 0, Q), torch.where(columns[..., :c], eye_like(R), R)


def _nan(x: Tensor, undefined: Tensor) -> Tensor:
    """$x$, with nan where it is undefined."""
    return nan_unless_zero(x + torch.where(undefined, math.nan, 0).to(x.dtype), undefined)


def _where_defined(grad_Q: Tensor | None, grad_R: Tensor | None, A: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    """$gA$ of the module's docstring: nan, unless every undefined entry has a cotangent of zero."""
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


def _from_factors(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor) -> Tensor:
    """The backward without $A$, for a given cotangent and at most as many columns as rows."""
    return linalg_qr_backward.reference(grad_Q, grad_R, Q @ R, Q, R, "reduced")


def _is_small(Q: Tensor, m: int) -> bool:
    if Q.is_cuda and Q.dtype == torch.complex128 and m > LIMITS["shared_qr"]:  # six matrices are in shared memory
        return False
    return small(Q, m, in_cache=_IN_CACHE)


def _backward_by_rank(
    compiled: Callable[..., Tensor],
    grad_Q: Tensor | None,
    grad_R: Tensor | None,
    A: Tensor,
    Q: Tensor,
    R: Tensor,
    mode: str,
) -> Tensor | None:
    """`linalg_qr_backward` by the kernel, or by the shorter formula if the rank is full; reports gauge dependence."""
    m, n = A.shape[-2:]
    if mode == "complete" and m > n and grad_Q is not None:
        report(depends_on_basis(Q[..., n:], grad_Q[..., n:]), "warn", "derivative of the QR factorization")
    if Q.shape[-1] == n and _is_small(Q, m):
        return compiled(grad_Q, grad_R, Q, R)
    if not A.is_cpu:  # reading the rank would synchronize
        return None

    def again(*tensors: Tensor | None) -> tuple[Tensor]:
        return (linalg_qr_backward.reference(*tensors, mode),)

    full = _full_rank_backward(grad_Q, grad_R, Q, R, _determining(A))
    found = _where_deficient((full,), A, R, again, grad_Q, grad_R, A, Q, R)
    return found if found is None else found[0]


@formula(
    kernels=Kernel(
        "cpu",
        "cuda",
        when=lambda grad_Q, grad_R, mode: mode in ("reduced", "complete") and not (grad_Q is None and grad_R is None),
        compiled=_from_factors,
        python=_backward_by_rank,
        tracked=True,
    )
)
def linalg_qr_backward(
    grad_Q: Tensor | None, grad_R: Tensor | None, A: Tensor, Q: Tensor, R: Tensor, mode: str
) -> Tensor:
    """Cotangent of $A$, given those of $Q$ and $R$: $Q gR$, and $(G - Q (K - W))_c R_c^-H$ in the leading columns.

    Args:
        grad_Q: cotangent of $Q$, (*, m, w), or (0,) with mode "r", where it is not used; None for zero.
        grad_R: cotangent of $R$, (*, w, n); None for zero. Its entries below the diagonal have no effect.
        A: (*, m, n), real or complex.

    Returns:
        (*, m, n), column-major.

    Raises:
        RuntimeError: an unknown mode.

    Note:
        Where not differentiable: at zero pivots. The result is nan, unless every undefined entry has a cotangent of
        zero, or the loss is a function of $Q R$ and only rounding errors remain after the leading columns. With mode
        "complete" and $m > n$, the result is the derivative of the span of the last columns of $Q$, with a GaugeWarning if
        the loss depends on more.
    """
    Q = _with_Q(A, Q, mode)
    grad_Q = None if mode == "r" else grad_Q
    grad_A = _where_defined(grad_Q, grad_R, A, Q, R)
    if (grad_Q is not None or grad_R is not None) and _may_be_left_by_rounding(Q, R, _determining(A)):
        of_product, settled = qr_rounding_backward(grad_Q, grad_R, Q, R, _determining(A))
        grad_A = torch.where(settled[..., None, None], of_product, grad_A)
    return grad_A.mT.contiguous().mT


def _jvp_by_rank(A_t: Tensor, A_p: Tensor, Q: Tensor, R: Tensor, mode: str) -> tuple[Tensor, ...] | None:
    """`linalg_qr_jvp` by the shorter formula if the rank is full."""

    def again(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return linalg_qr_jvp.reference(*tensors, mode)

    return _where_deficient(_full_rank_jvp(A_t, Q, R), A_p, R, again, A_t, A_p, Q, R)


@formula(kernels=Kernel("cpu", when=lambda mode: mode in ("reduced", "complete"), python=_jvp_by_rank))
def linalg_qr_jvp(A_t: Tensor, A_p: Tensor, Q: Tensor, R: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Tangents of $Q$ and $R$: $dQ = dA_c R_c^-1 - Q (N - Omega)$, $dR = triu(dQ^H A + Q^H dA)$ (see the module).

    Args:
        A_p: $A$, (*, m, n), real or complex.

    Returns:
        The tangents, of the shapes of ``Q`` and ``R``, row-major. With mode "r" the first is zero.

    Raises:
        RuntimeError: an unknown mode.

    Note:
        Where not differentiable: at zero pivots. The columns of $Q$ and the rows of $R$ are nan from there on. If only
        rounding errors remain after the leading columns, the tangent of $Q R$ is right, and there is a GaugeWarning. With
        mode "complete" and $m > n$, the last columns of $Q$ do not rotate within their span.
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


# -- the rule ---------------------------------------------------------------------------------------------------------

rule(
    "aten::linalg_qr",
    vjp={"A": linalg_qr_backward},
    compiled_vjp=CompiledVjp(
        "A",
        linalg_qr_backward,
        {},
        LARGEST,
        only={"mode": "reduced"},
        square=("R",),
        on_cpu=True,  # on CUDA complex128 has another limit
    ),
    jvp={("Q", "R"): linalg_qr_jvp},
    source="ATen linalg_qr_backward, linalg_qr_jvp",
    improves=("values", "missing"),
)
