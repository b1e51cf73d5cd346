"""The LU factorization: linalg_lu, linalg_lu_factor_ex, lu_unpack.

$A = P L U$, $A$ of shape (m, n), $k = min(m, n)$, with $P$ constant: it does not change where the factors are
differentiable. Write $B = P^T dA$, and a subscript 1 for the first $k$ rows or columns. Multiply $B = dL U + L dU$ from
the left by $L1^-1$: the first $k$ rows are the sum of a strictly lower and an upper triangle,

    Y = L1^-1 B_1 = S U + dU,   S = L1^-1 dL_1 = tril(Y U_1^-1, -1),   dL_1 = L1 S,   dU = Y - S U,

and for $m > n$ the other rows follow: $dL_2 = (B_2 - L_2 dU) U^-1$. The last column of $S$ is zero, and its other
columns need only the leading block $U'$ of $U$ of order $k - 1$: nothing is divided by the last pivot, except in
$dL_2$. The adjoint of all this, for cotangents $gL$ and $gU$, with $R = gL_2 U^-H$ and with $gU$ reduced by $L_2^H R$
if $m > n$:

    gA = P [L1^-H (triu(gU) + T U'^-H); R],   T = tril(L1^H gL_1 - triu(gU) U^H, -1).

Where not differentiable: at a zero pivot before the last one; for $m > n$, if $L$ has a cotangent, at any zero pivot.
The result is then inf or nan. If only the last pivot is zero, the factors are smooth if $m <= n$, and $U$ alone is smooth if
$m > n$. Points where the pivoting changes are not detected: the derivative is that for the $P$ that was chosen.

For a batch of row-major matrices, solving from the right is twice as fast as from the left, so every formula here does that.

Args:
    grad_L: cotangent of $L$, (*, m, k). The entries below the diagonal are read. None for zero.
    grad_U: cotangent of $U$, (*, k, n). The upper triangle is read. None for zero.
    grad_LU: cotangent of the packed factors, (*, m, n).
    A_t: tangent of $A$, (*, m, n).
    P: (*, m, m), a permutation, and constant.
    L: (*, m, k).
    U: (*, k, n).
    LU: the packed factors, (*b, m, n).
    pivots: those of the factorization, (*b, k), int32; $k = min(m, n)$.
    pivot: False if there was no pivoting. $P$ is then ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.core.limits import LIMITS
from torch_manualgrad.core.rule import CompiledVjp, Kernel, formula, rule

from . import blocks
from .common import LARGEST, leading, pivots_fit, small

_IN_CACHE = kernel_limit("cached_order")


def solve_left(T: Tensor, B: Tensor, *, upper: bool, unitriangular: bool = False) -> Tensor:
    """$T^-1 B$ for a triangular $T$, solved from the right."""
    found = torch.linalg.solve_triangular(T.mT, B.mT, upper=not upper, left=False, unitriangular=unitriangular)
    return found.mT


def _padded(X: Tensor, rows: int, columns: int) -> Tensor:
    """$X$, followed by this many rows and columns of zeros."""
    return torch.constant_pad_nd(X, (0, columns, 0, rows)) if rows or columns else X


def permuted(P: Tensor, X: Tensor) -> Tensor:
    """$P X$ for a permutation $P$: a product for small matrices; otherwise, rows are moved."""
    m, n = X.shape[-2:]
    if m * X.numel() <= LIMITS["permuting_product"]:
        return P @ X
    P = P.real if P.is_complex() else P
    rows = (P @ torch.arange(m, dtype=P.dtype, device=P.device)).long()
    count = X.shape[:-2].numel()
    if X.dim() > 2:
        start = m * torch.arange(count, device=P.device)
        rows = rows + start.reshape(*X.shape[:-2], 1)
    return X.reshape(count * m, n).index_select(0, rows.reshape(count * m)).reshape(X.shape)


def _coupled(grad_L: Tensor | None, grad_U: Tensor | None, L: Tensor, U: Tensor) -> Tensor:
    """$triu(gU) + T U'^-H$, (*, k, n)."""
    n, k = U.shape[-1], L.shape[-1]
    T = None if grad_L is None else L.mH @ grad_L
    if grad_U is not None:
        grad_U = grad_U.triu()
        product = grad_U @ U.mH
        T = -product if T is None else T - product
    assert T is not None
    last = max(k - 1, 0)
    U1, T = leading(U, rows=last, columns=last), leading(T.tril(-1), columns=last)
    X = torch.linalg.solve_triangular(U1.mH, T, upper=False, left=False)
    X = _padded(X, 0, n - last)
    return X if grad_U is None else grad_U + X


def _backward(
    coupled: Callable[[Tensor | None, Tensor | None, Tensor, Tensor], Tensor],
    grad_L: Tensor | None,
    grad_U: Tensor | None,
    P: Tensor,
    L: Tensor,
    U: Tensor,
    pivot: bool,
) -> Tensor:
    m, n, k = L.shape[-2], U.shape[-1], L.shape[-1]
    R = None
    if m > n and grad_L is not None:
        R = torch.linalg.solve_triangular(U.mH, grad_L[..., k:, :], upper=False, left=False)
        reduction = L[..., k:, :].mH @ R
        grad_U = -reduction if grad_U is None else grad_U - reduction
        L, grad_L = leading(L, rows=k), leading(grad_L, rows=k)
    elif m > n:
        L = leading(L, rows=k)
    gradient = solve_left(L.mH, coupled(grad_L, grad_U, L, U), upper=True, unitriangular=True)
    if m > n:
        gradient = _padded(gradient, m - n, 0) if R is None else torch.cat([gradient, R], -2)
    return permuted(P, gradient) if pivot else gradient


def _is_small(grad_L: Tensor | None, grad_U: Tensor | None, L: Tensor, U: Tensor) -> bool:
    given = grad_L is not None or grad_U is not None
    return given and small(U, max(L.shape[-2], U.shape[-1]), _IN_CACHE)


def _is_large(grad_L: Tensor | None, grad_U: Tensor | None, L: Tensor) -> bool:
    return (grad_L is not None or grad_U is not None) and blocks.serve(L, LIMITS["lu_blocks"])


def _by_blocks(grad_L: Tensor | None, grad_U: Tensor | None, P: Tensor, L: Tensor, U: Tensor, pivot: bool) -> Tensor:
    """`linalg_lu_backward` of a large matrix, by blocks of columns."""
    return _backward(blocks.coupled, grad_L, grad_U, P, L, U, pivot)


@formula(
    kernels=(
        Kernel("cpu", "cuda", when=_is_small),
        Kernel("cpu", when=_is_large, python=_by_blocks),
    )
)
def linalg_lu_backward(
    grad_L: Tensor | None, grad_U: Tensor | None, P: Tensor, L: Tensor, U: Tensor, pivot: bool
) -> Tensor:
    """Cotangent of $A$, given those of $L$ and $U$: $gA$ of the module's docstring.

    Returns:
        (*, m, n), the dtype of $L$.

    References:
        ATen linalg_lu_backward, which divides by the last pivot. This one does not.
    """
    if grad_L is None and grad_U is None:
        return L.new_zeros(*L.shape[:-1], U.shape[-1])
    return _backward(_coupled, grad_L, grad_U, P, L, U, pivot)


@formula(kernels=Kernel("cpu", "cuda", when=lambda A_t: small(A_t, max(A_t.shape[-2:]))))
def linalg_lu_jvp(A_t: Tensor, P: Tensor, L: Tensor, U: Tensor, pivot: bool) -> tuple[Tensor, Tensor]:
    """Tangents of $L$ and $U$, given that of $A$: $dL$ and $dU$ of the module's docstring.

    Returns:
        $dL$, (*, m, k), strictly lower triangular, and $dU$, (*, k, n), upper triangular.

    References:
        ATen linalg_lu_jvp, which divides by the last pivot. This one does not.
    """
    m, n, k = L.shape[-2], U.shape[-1], L.shape[-1]
    B = permuted(P.mT, A_t) if pivot else A_t
    last = max(k - 1, 0)
    L1, U1 = leading(L, rows=k), leading(U, rows=last)
    Y = solve_left(L1, leading(B, rows=k), upper=False, unitriangular=True)
    U2, Y2 = leading(U1, columns=last), leading(Y, columns=last)
    S = torch.linalg.solve_triangular(U2, Y2, upper=True, left=False).tril(-1)
    dU = (Y - S @ U1).triu()
    dL = _padded(L1 @ S, 0, k - last) if last else torch.zeros_like(L1)
    if m > n:
        rest = torch.linalg.solve_triangular(U, B[..., k:, :] - L[..., k:, :] @ dU, upper=True, left=False)
        dL = torch.cat([dL, rest], -2)
    return dL, dU


@formula
def lu_unpack_backward(grad_L: Tensor | None, grad_U: Tensor | None, m: int, n: int) -> Tensor:
    """Cotangent of the packed factors, given those of $L$ and $U$: $tril(gL, -1) + triu(gU)$, each padded by zeros.

    Args:
        m, n: the sizes of the packed matrix; $k = min(m, n)$.

    Returns:
        (*, m, n).

    Raises:
        ValueError: both cotangents are None, so the batch is unknown; or a size does not fit $m$ and $n$.
    """
    k = min(m, n)
    if grad_L is None and grad_U is None:
        raise ValueError("lu_unpack_backward: grad_L and grad_U are both None")
    for name, grad, expected in (("grad_L", grad_L, (m, k)), ("grad_U", grad_U, (k, n))):
        if grad is not None and grad.shape[-2:] != expected:
            raise ValueError(
                f"{name}: expected (*, {expected[0]}, {expected[1]}) for {m=} and {n=}, got {list(grad.shape)}"
            )
    lower = None if grad_L is None else _padded(grad_L.tril(-1), 0, n - k)
    if grad_U is None:
        assert lower is not None
        return lower
    upper = _padded(grad_U.triu(), m - k, 0)
    return upper if lower is None else lower + upper


def unpacked(LU: Tensor) -> tuple[Tensor, Tensor]:
    """The strictly lower triangle in the shape of $L$, and the upper triangle in the shape of $U$."""
    k = min(LU.shape[-2:])
    return leading(LU, columns=k).tril(-1), leading(LU, rows=k).triu()


def _lu_unpack_jvp(LU_data_t: Tensor, unpack_data: bool) -> tuple[Tensor | None, Tensor | None]:
    return unpacked(LU_data_t) if unpack_data else (None, None)


@formula(kernels=Kernel("cpu", "cuda", when=lambda LU: small(LU, max(LU.shape[-2:]), _IN_CACHE)), requires=pivots_fit)
def lu_factor_ex_backward(grad_LU: Tensor, LU: Tensor, pivots: Tensor, pivot: bool) -> Tensor:
    """Cotangent of $A$, given that of the packed factors: `linalg_lu_backward` of their two triangles.

    Returns:
        (*, m, n).
    """
    P, L, U = torch.lu_unpack(LU, pivots, unpack_pivots=pivot)
    k = L.shape[-1]
    return linalg_lu_backward(leading(grad_LU, columns=k), leading(grad_LU, rows=k), P, L, U, pivot)


@formula(kernels=Kernel("cpu", "cuda", when=lambda LU: small(LU, max(LU.shape[-2:]))), requires=pivots_fit)
def lu_factor_ex_jvp(A_t: Tensor, LU: Tensor, pivots: Tensor, pivot: bool) -> Tensor:
    """Tangent of the packed factors: $dL + dU$ of `linalg_lu_jvp`, in one matrix.

    Returns:
        (*, m, n).
    """
    P, L, U = torch.lu_unpack(LU, pivots, unpack_pivots=pivot)
    dL, dU = linalg_lu_jvp(A_t, P, L, U, pivot)
    m, n, k = L.shape[-2], U.shape[-1], L.shape[-1]
    return _padded(dL, 0, n - k) + _padded(dU, m - k, 0)


# -- the rules --------------------------------------------------------------------------------------------------------

lu_rule = rule(
    "aten::linalg_lu",
    vjp={"A": linalg_lu_backward},
    jvp={("L", "U"): linalg_lu_jvp},
    not_differentiable="P",
    source="ATen linalg_lu_backward, linalg_lu_jvp",
    improves=("values", "speed"),
    compiled_vjp=CompiledVjp("A", linalg_lu_backward, {}, LARGEST),
)
rule(
    "aten::linalg_lu_factor_ex",
    vjp={"A": lu_factor_ex_backward},
    jvp={"LU": lu_factor_ex_jvp},
    not_differentiable=("pivots", "info"),
    source="ATen lu_factor_ex_backward, lu_factor_ex_jvp",
    improves=("values", "speed"),
    compiled_vjp=CompiledVjp("A", lu_factor_ex_backward, {}, LARGEST),
)
rule(
    "aten::lu_unpack",
    vjp={"LU_data": lambda grad_L, grad_U, LU_data_sizes: lu_unpack_backward(grad_L, grad_U, *LU_data_sizes[-2:])},
    jvp={("L", "U"): _lu_unpack_jvp},
    not_differentiable="P",
    source="ATen lu_unpack_backward",
    finite=True,
)
