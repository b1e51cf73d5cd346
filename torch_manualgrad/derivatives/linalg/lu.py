"""The LU factorisation: linalg_lu, linalg_lu_factor_ex, lu_unpack, linalg_lu_solve.

A = P L U, A of shape (m, n), k = min(m, n), with P constant: it does not change where the factors are differentiable.
Write B = P^T dA, and a subscript 1 for the first k rows or columns. Multiplying B = dL U + L dU from the left by
L1^-1, the first k rows fall apart into a strictly lower and an upper triangle,

    Y = L1^-1 B_1 = S U + dU,   S = L1^-1 dL_1 = tril(Y U_1^-1, -1),   dL_1 = L1 S,   dU = Y - S U,

and for m > n the other rows follow: dL_2 = (B_2 - L_2 dU) U^-1. The last column of S is zero, and its others need the
leading (k-1) x (k-1) block U' of U alone: nothing is divided by the last pivot, except in dL_2. The adjoint of all this,
for cotangents gL, gU, with R = gL_2 U^-H and gU reduced by L_2^H R if m > n:

    gA = P [L1^-H (triu(gU) + T U'^-H); R],   T = tril(L1^H gL_1 - triu(gU) U^H, -1).

Non-smooth points. A last pivot of zero is none for m <= n: the factors are smooth there as long as the other pivots are
not zero, and so is U alone for m > n. An earlier zero (for m > n and a cotangent of L: any) leaves no derivative, and
gives inf or nan. The points where the pivoting changes are not marked: the derivative is that of the P that was chosen.

Solving from the right is twice as fast as from the left in a batch of row-major matrices, so everything here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.formula import Kernel, formula
from torch_manualgrad.core.rule import CompiledVjp, Sample, rule
from torch_manualgrad.derivatives.linalg import blocks
from torch_manualgrad.derivatives.linalg.common import LARGEST, leading, random, random_conditioned, small

# Up to which side the CPU kernel for single real square matrices is faster than BLAS, by measurement.
_IN_CACHE = 256


def _solve_left(T: Tensor, B: Tensor, *, upper: bool, unitriangular: bool = False) -> Tensor:
    """T^-1 B."""
    found = torch.linalg.solve_triangular(T.mT, B.mT, upper=not upper, left=False, unitriangular=unitriangular)
    return found.mT


def _padded(X: Tensor, rows: int, columns: int) -> Tensor:
    """X with so many rows and columns of zeros after it."""
    return torch.constant_pad_nd(X, (0, columns, 0, rows)) if rows or columns else X


def _permuted(P: Tensor, X: Tensor) -> Tensor:
    """P X for a permutation P: of more than a small matrix by moving rows."""
    m, n = X.shape[-2:]
    if m * X.numel() <= 64**3:
        return P @ X
    P = P.real if P.is_complex() else P
    rows = (P @ torch.arange(m, dtype=P.dtype, device=P.device)).long()
    count = X.shape[:-2].numel()
    if X.dim() > 2:
        start = m * torch.arange(count, device=P.device)
        rows = rows + start.reshape(*X.shape[:-2], 1)
    return X.reshape(count * m, n).index_select(0, rows.reshape(count * m)).reshape(X.shape)


def _coupled(L_grad: Tensor | None, U_grad: Tensor | None, L: Tensor, U: Tensor) -> Tensor:
    """triu(gU) + T U'^-H, ``(*, k, n)``."""
    n, k = U.shape[-1], L.shape[-1]
    T = None if L_grad is None else L.mH @ L_grad
    if U_grad is not None:
        U_grad = U_grad.triu()
        product = U_grad @ U.mH
        T = -product if T is None else T - product
    assert T is not None
    last = max(k - 1, 0)
    U1, T = leading(U, rows=last, columns=last), leading(T.tril(-1), columns=last)
    X = torch.linalg.solve_triangular(U1.mH, T, upper=False, left=False)
    X = _padded(X, 0, n - last)
    return X if U_grad is None else U_grad + X


def _pull_back(
    coupled: Callable[[Tensor | None, Tensor | None, Tensor, Tensor], Tensor],
    L_grad: Tensor | None,
    U_grad: Tensor | None,
    P: Tensor,
    L: Tensor,
    U: Tensor,
    pivot: bool,
) -> Tensor:
    m, n, k = L.shape[-2], U.shape[-1], L.shape[-1]
    R = None
    if m > n and L_grad is not None:
        R = torch.linalg.solve_triangular(U.mH, L_grad[..., k:, :], upper=False, left=False)
        reduction = L[..., k:, :].mH @ R
        U_grad = -reduction if U_grad is None else U_grad - reduction
        L, L_grad = leading(L, rows=k), leading(L_grad, rows=k)
    elif m > n:
        L = leading(L, rows=k)
    gradient = _solve_left(L.mH, coupled(L_grad, U_grad, L, U), upper=True, unitriangular=True)
    if m > n:
        gradient = _padded(gradient, m - n, 0) if R is None else torch.cat([gradient, R], -2)
    return _permuted(P, gradient) if pivot else gradient


def _lu_is_small(grad_L: Tensor | None, grad_U: Tensor | None, L: Tensor, U: Tensor) -> bool:
    given = grad_L is not None or grad_U is not None
    return given and small(U, max(L.shape[-2], U.shape[-1]), _IN_CACHE)


def _lu_is_large(grad_L: Tensor | None, grad_U: Tensor | None, L: Tensor) -> bool:
    return (grad_L is not None or grad_U is not None) and blocks.serve(L, 128)


def _by_blocks(grad_L: Tensor | None, grad_U: Tensor | None, P: Tensor, L: Tensor, U: Tensor, pivot: bool) -> Tensor:
    """`linalg_lu_backward` of a large matrix; see blocks.py."""
    return _pull_back(blocks.coupled, grad_L, grad_U, P, L, U, pivot)


@formula(
    kernels=(
        Kernel("cpu", "cuda", when=_lu_is_small),
        Kernel("cpu", when=_lu_is_large, python=_by_blocks),
    )
)
def linalg_lu_backward(
    grad_L: Tensor | None, grad_U: Tensor | None, P: Tensor, L: Tensor, U: Tensor, pivot: bool
) -> Tensor:
    """Cotangent of A for those of L and U: gA of the module's docstring.

    Args:
        grad_L: cotangent of L, ``(*, m, k)``; what is not below the diagonal is ignored. None for zero.
        grad_U: cotangent of U, ``(*, k, n)``; what is below the diagonal is ignored. None for zero.
        P, L, U: the factors, ``(*, m, m)``, ``(*, m, k)``, ``(*, k, n)``. P is a permutation, and constant.
        pivot: False if there was no pivoting; then P is ignored.
    Returns:
        ``(*, m, n)`` in the dtype of L.
    Where not differentiable: the module's docstring; right at a last pivot of zero, inf or nan at an earlier one.
    Source: ATen linalg_lu_backward, here without division by the last pivot.
    """
    if grad_L is None and grad_U is None:
        return L.new_zeros(*L.shape[:-1], U.shape[-1])
    return _pull_back(_coupled, grad_L, grad_U, P, L, U, pivot)


@formula(kernels=Kernel("cpu", "cuda", when=lambda A_t: small(A_t, max(A_t.shape[-2:]))))
def linalg_lu_jvp(A_t: Tensor, P: Tensor, L: Tensor, U: Tensor, pivot: bool) -> tuple[Tensor, Tensor]:
    """Tangents of L and U for that of A: dL and dU of the module's docstring.

    Args:
        A_t: tangent of A, ``(*, m, n)``.
        P, L, U, pivot: as linalg_lu_backward.
    Returns:
        dL ``(*, m, k)``, strictly lower triangular, and dU ``(*, k, n)``, upper triangular.
    Where not differentiable: as linalg_lu_backward, of which this is the adjoint.
    Source: ATen linalg_lu_jvp, here without division by the last pivot.
    """
    m, n, k = L.shape[-2], U.shape[-1], L.shape[-1]
    B = _permuted(P.mT, A_t) if pivot else A_t
    last = max(k - 1, 0)
    L1, U1 = leading(L, rows=k), leading(U, rows=last)
    Y = _solve_left(L1, leading(B, rows=k), upper=False, unitriangular=True)
    U2, Y2 = leading(U1, columns=last), leading(Y, columns=last)
    S = torch.linalg.solve_triangular(U2, Y2, upper=True, left=False).tril(-1)
    dU = (Y - S @ U1).triu()
    dL = _padded(L1 @ S, 0, k - last) if last else torch.zeros_like(L1)
    if m > n:
        rest = torch.linalg.solve_triangular(U, B[..., k:, :] - L[..., k:, :] @ dU, upper=True, left=False)
        dL = torch.cat([dL, rest], -2)
    return dL, dU


@formula
def lu_unpack_backward(L_grad: Tensor | None, U_grad: Tensor | None, m: int, n: int) -> Tensor:
    """Cotangent of the packed factors for those of L and U: tril(gL, -1) + triu(gU), each padded by zeros.

    Args:
        L_grad: cotangent of L, ``(*, m, k)``, or None for zero.
        U_grad: cotangent of U, ``(*, k, n)``, or None for zero.
        m, n: the size of the packed matrix; k = min(m, n).
    Returns:
        ``(*, m, n)``.
    Raises:
        ValueError: both are None, so that the batch is not known; or a size that does not fit m and n.
    Source: ATen lu_unpack_backward.
    """
    k = min(m, n)
    if L_grad is None and U_grad is None:
        raise ValueError("lu_unpack_backward: L_grad and U_grad are both None")
    for name, grad, expected in (("L_grad", L_grad, (m, k)), ("U_grad", U_grad, (k, n))):
        if grad is not None and grad.shape[-2:] != expected:
            raise ValueError(
                f"{name}: expected (*, {expected[0]}, {expected[1]}) for {m=} and {n=}, got {list(grad.shape)}"
            )
    lower = None if L_grad is None else _padded(L_grad.tril(-1), 0, n - k)
    if U_grad is None:
        assert lower is not None
        return lower
    upper = _padded(U_grad.triu(), m - k, 0)
    return upper if lower is None else lower + upper


@formula(kernels=Kernel("cpu", "cuda", when=lambda LU: small(LU, max(LU.shape[-2:]), _IN_CACHE)))
def lu_factor_ex_backward(grad_LU: Tensor, LU: Tensor, pivots: Tensor, pivot: bool) -> Tensor:
    """Cotangent of A for that of the packed factors: linalg_lu_backward of their two triangles.

    Args:
        grad_LU: cotangent of the packed factors, ``(*, m, n)``.
        LU: the packed factors, ``(*, m, n)``.
        pivots: those of the factorisation, ``(*, k)``.
        pivot: whether there was pivoting.
    Returns:
        ``(*, m, n)``.
    Where not differentiable: as linalg_lu_backward. Source: ATen lu_factor_ex_backward.
    """
    P, L, U = torch.lu_unpack(LU, pivots, unpack_pivots=pivot)
    k = L.shape[-1]
    return linalg_lu_backward(leading(grad_LU, columns=k), leading(grad_LU, rows=k), P, L, U, pivot)


@formula(kernels=Kernel("cpu", "cuda", when=lambda LU: small(LU, max(LU.shape[-2:]))))
def lu_factor_ex_jvp(A_t: Tensor, LU: Tensor, pivots: Tensor, pivot: bool) -> Tensor:
    """Tangent of the packed factors: dL + dU of linalg_lu_jvp, in one matrix.

    Args:
        A_t: tangent of A, ``(*, m, n)``.
        LU, pivots, pivot: as lu_factor_ex_backward.
    Returns:
        ``(*, m, n)``.
    Where not differentiable: as linalg_lu_jvp. Source: ATen lu_factor_ex_jvp.
    """
    P, L, U = torch.lu_unpack(LU, pivots, unpack_pivots=pivot)
    dL, dU = linalg_lu_jvp(A_t, P, L, U, pivot)
    m, n, k = L.shape[-2], U.shape[-1], L.shape[-1]
    return _padded(dL, 0, n - k) + _padded(dU, m - k, 0)


# Solving with A = P L U. A case from the right is the one from the left with X^H, B^H, A^H: A X = B if left is not
# adjoint, else A^H X = B. There
#     A X = B:     dX = A^-1 (dB - P (dL U + L dU) X),
#     A^H X = B:   dX = A^-H (dB - (dL U + L dU)^H P^T X).


def _lu_solve_vjp(
    gX: Tensor, LU: Tensor, pivots: Tensor, X: Tensor, left: bool, adjoint: bool, of_B: bool
) -> tuple[Tensor, Tensor | None]:
    """Cotangents of the packed factors and, if wanted, of B.

    With gB = A^-H gX for A X = B, and A^-1 gX for A^H X = B, the cotangent of P^T A is -E with E = P^T gB X^H, and
    P^T X gB^H, so that of the factors is -(tril(E U^H, -1) + triu(L^H E)). For few right hand sides these are formed
    from products with columns, for many from the product of matrices that is at hand.
    """
    P, L, U = torch.lu_unpack(LU, pivots)
    if not left:
        gX, X = gX.mH, X.mH
    few = 2 * X.shape[-1] <= X.shape[-2]
    gB = None
    if left != adjoint:
        V = _solve_left(U.mH, gX, upper=False)
        gU = V @ X.mH
        if few or of_B:
            gB = _solve_left(L.mH, V, upper=True, unitriangular=True)
        if few:
            assert gB is not None
            gL = gB @ (U @ X).mH
        else:
            gL = _solve_left(L.mH, gU, upper=True, unitriangular=True) @ U.mH
        gB = _permuted(P, gB) if of_B else None
    else:
        Y = _permuted(P.mT, X)
        Z = _solve_left(L, _permuted(P.mT, gX), upper=False, unitriangular=True)
        gL = Y @ Z.mH
        if few or of_B:
            gB = _solve_left(U, Z, upper=True)
        if few:
            assert gB is not None
            gU = (L.mH @ Y) @ gB.mH
        else:
            gU = L.mH @ torch.linalg.solve_triangular(U.mH, gL, upper=False, left=False)
    return -(gL.tril(-1) + gU.triu()).sum_to_size(LU.shape), gB if left or gB is None else gB.mH


@formula
def linalg_lu_solve_LU(gX: Tensor, LU: Tensor, pivots: Tensor, X: Tensor, left: bool, adjoint: bool) -> Tensor:
    """Cotangent of the packed factors of A for that of the solution X of A X = B, and of the three other cases.

    Args:
        gX: cotangent of X, the shape of X.
        LU: the packed factors, ``(*, n, n)``; the batch is broadcast to that of X.
        pivots: ``(*, n)``.
        X: the solution, ``(*, n, r)``, or ``(*, r, n)`` if not ``left``.
        left, adjoint: the solution is that of A X = B, A^H X = B (adjoint), X A = B (not left), X A^H = B (neither).
    Returns:
        The shape of LU.
    Source: ATen linalg_lu_solve_LU.
    """
    return _lu_solve_vjp(gX, LU, pivots, X, left, adjoint, False)[0]


@formula
def linalg_lu_solve_jvp(
    X: Tensor, LU: Tensor, pivots: Tensor, dLU: Tensor | None, dB: Tensor | None, left: bool, adjoint: bool
) -> Tensor:
    """Tangent of the solution X of A X = B, and of the three other cases: A^-1 (dB - dA X), dA = P (dL U + L dU).

    Args:
        X, LU, pivots, left, adjoint: as linalg_lu_solve_LU.
        dLU: tangent of the packed factors, or None for zero.
        dB: tangent of B, whose batch is broadcast to that of X, or None for zero.
    Returns:
        The shape of X.
    Source: ATen linalg_lu_solve_jvp.
    """
    right_hand_side = torch.zeros_like(X) if dB is None else dB.expand(X.shape)
    if not left:
        right_hand_side, X = right_hand_side.mH, X.mH
    if dLU is not None:
        P, L, U = torch.lu_unpack(LU, pivots)
        dL, dU = dLU.tril(-1), dLU.triu()
        if left != adjoint:
            dAX = _permuted(P, dL @ (U @ X) + L @ (dU @ X))
        else:
            Y = _permuted(P.mT, X)
            dAX = U.mH @ (dL.mH @ Y) + dU.mH @ (L.mH @ Y)
        right_hand_side = right_hand_side - dAX
    tangent = torch.linalg.lu_solve(LU, pivots, right_hand_side, adjoint=left == adjoint)
    return tangent if left else tangent.mH


def unpacked(LU: Tensor) -> tuple[Tensor, Tensor]:
    """The strictly lower triangle in the shape of L, and the upper one in that of U."""
    k = min(LU.shape[-2:])
    return leading(LU, columns=k).tril(-1), leading(LU, rows=k).triu()


def _lu_solve_gradients(
    grad: Tensor, LU: Tensor, pivots: Tensor, result: Tensor, left: bool, adjoint: bool, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if not output_mask[0]:
        return None, torch.linalg.lu_solve(LU, pivots, grad, left=left, adjoint=not adjoint)
    if not output_mask[1]:
        return linalg_lu_solve_LU(grad, LU, pivots, result, left, adjoint), None
    # autograd itself sums a gradient to the batch of B
    return _lu_solve_vjp(grad, LU, pivots, result, left, adjoint, True)


def _unpack_jvp(LU_data_t: Tensor, unpack_data: bool) -> tuple[Tensor | None, Tensor | None]:
    return unpacked(LU_data_t) if unpack_data else (None, None)


def _matrices(dtype: torch.dtype, device: torch.device | str) -> Iterable[Tensor]:
    for shape in ((3, 3), (2, 4, 2), (2, 2, 4), (2, 1, 3, 3), (1, 1), (0, 2, 2)):
        yield random(*shape, dtype=dtype, device=device, seed=3)
    yield random(3, 4, dtype=dtype, device=device, seed=4).mT


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    return map(Sample, _matrices(dtype, device))


def _unpack_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for A in _matrices(dtype, device):
        yield Sample(*torch.linalg.lu_factor(A))


def _solve_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    LU, pivots = torch.linalg.lu_factor(random_conditioned(3, 3, dtype=dtype, device=device))
    for left in (True, False):
        for adjoint in (False, True):
            for r in (1, 3):
                B = random(*((3, r) if left else (r, 3)), dtype=dtype, device=device, seed=r)
                yield Sample(LU, pivots, B, left=left, adjoint=adjoint)
    yield Sample(LU, pivots, random(2, 3, 2, dtype=dtype, device=device))
    LU, pivots = torch.linalg.lu_factor(random_conditioned(2, 3, 3, dtype=dtype, device=device))
    yield Sample(LU, pivots, random(3, 1, dtype=dtype, device=device), adjoint=True)


lu_rule = rule(
    "aten::linalg_lu",
    vjp={"A": linalg_lu_backward},
    jvp={("L", "U"): linalg_lu_jvp},
    not_differentiable="P",
    source="ATen linalg_lu_backward, linalg_lu_jvp",
    improves=("values", "speed"),
    compiled_vjp=CompiledVjp("A", linalg_lu_backward, {}, LARGEST),
    samples=_samples,
)
rule(
    "aten::linalg_lu_factor_ex",
    vjp={"A": lu_factor_ex_backward},
    jvp={"LU": lu_factor_ex_jvp},
    not_differentiable=("pivots", "info"),
    source="ATen lu_factor_ex_backward, lu_factor_ex_jvp",
    improves=("values", "speed"),
    compiled_vjp=CompiledVjp("A", lu_factor_ex_backward, {}, LARGEST),
    samples=_samples,
)
rule(
    "aten::lu_unpack",
    vjp={"LU_data": lambda grad_L, grad_U, LU_data_sizes: lu_unpack_backward(grad_L, grad_U, *LU_data_sizes[-2:])},
    jvp={("L", "U"): _unpack_jvp},
    uses=lu_unpack_backward,
    not_differentiable="P",
    source="ATen lu_unpack_backward",
    samples=_unpack_samples,
)
rule(
    "aten::linalg_lu_solve",
    vjp={("LU", "B"): _lu_solve_gradients},
    jvp={
        "result": lambda result, LU_p, pivots, LU_t, B_t, left, adjoint: linalg_lu_solve_jvp(
            result, LU_p, pivots, LU_t, B_t, left, adjoint
        )
    },
    uses=(linalg_lu_solve_LU, linalg_lu_solve_jvp),
    source="ATen linalg_lu_solve_LU, linalg_lu_solve_jvp",
    improves=("missing", "speed"),
    samples=_solve_samples,
)
