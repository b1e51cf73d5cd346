"""Linear solves: _linalg_solve_ex, under solve and solve_ex.

Differentiating $A X = B$ gives $A dX + dA X = dB$, so that

    dX = A^-1 (dB - dA X),        gB = A^-H gX,        gA = -gB X^H,

and mirrored for $X A = B$: $dX = (dB - X dA) A^-1$, $gB = gX A^-H$, $gA = -X^H gB$. Batch dims broadcast; a gradient is
summed back to the shape of its input.

The LU factors that _linalg_solve_ex returns are not differentiable: they are constants to every derivative. Only
`solve_again` uses them, and its own derivative is that of a solve with $A$.

Args:
    A: (*, n, n).
    LU: the packed factors of $A$, (*b, n, n); constants to higher derivatives, which solve with $A$ again.
    pivots: those of the factorization, (*b, n), int32.
    left: whether $A X = B$, else $X A = B$.
    X, solution: the solution, (*, n, k) or (*, n).
    dA: tangent of $A$, (*, n, n); None for zero.
    dB: tangent of $B$, its shape; None for zero. One of the two is given.

Note:
    Where not differentiable: where $A$ is singular. The results for that matrix are inf or nan, those for the others in
    the batch are not affected, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.core.limits import LIMITS
from torch_manualgrad.core.rule import CompiledVjp, Kernel, formula, rule

from .common import LARGEST, pivots_fit, small, summed_to

_IN_CACHE = kernel_limit("cached_solve")
_BY_COLUMNS = kernel_limit("cached_order")
_LARGEST_TANGENT = LIMITS["solve_tangent"]


def _is_vector(A: Tensor, X: Tensor) -> bool:
    """Whether the solution $X$ is one vector for each matrix; with matrices as right-hand sides $X$ has all batch dims."""
    return X.dim() < A.dim()


def _aligned(A: Tensor, B: Tensor) -> Tensor:
    """$A$ with as many dims as $B$, which holds columns: torch.vmap of a solve is wrong if the numbers of dims differ."""
    return A[(None,) * (B.dim() - A.dim())]


def generic_solve_jvp(
    solve: Callable[[Tensor], Tensor], X: Tensor, A: Tensor, dA: Tensor | None, dB: Tensor | None, left: bool = True
) -> Tensor:
    """``solve(dB - dA X)``, or ``solve(dB - X dA)``, with vectors as columns; a missing tangent is zero."""
    vector = _is_vector(A, X)
    R = None if dB is None else dB.expand(X.shape)
    if vector:
        X, R = X.unsqueeze(-1), None if R is None else R.unsqueeze(-1)
    if dA is not None:
        product = dA @ X if left else X @ dA
        R = -product if R is None else R - product
    assert R is not None  # the jvp is called only if some input has a tangent
    dX = solve(R)
    return dX.squeeze(-1) if vector else dX


@formula(kernel=("default",), requires=pivots_fit)
def solve_again(A: Tensor, LU: Tensor, pivots: Tensor, B: Tensor, left: bool, adjoint: bool) -> Tensor:
    """$A^-1 B$ from the saved factors of $A$; its derivative is that of the solve with $A$.

    Args:
        B: (*, n, k), or (*, k, n) if not ``left``; with all batch dims.
        left: False for $B A^-1$.
        adjoint: whether to solve with $A^H$ instead of $A$.

    Returns:
        The shape of ``B``.

    References:
        ATen linalg_lu_solve, as linalg_solve_backward and linalg_solve_jvp call it.
    """
    A = _aligned(A, B)
    return torch.linalg.solve_ex(A.mH if adjoint else A, B, left=left).result


@formula(kernel=("cpu",), requires=pivots_fit)
def solve_eliminated(LU: Tensor, pivots: Tensor, B: Tensor, adjoint: bool) -> Tensor:
    """$A^-1 B$, or $A^-T B$, from the factors of a real $A$, many right-hand sides at a time.

    Args:
        LU: the packed factors, (*, n, n) with $n <= 512$; float32 or float64.
        B: (*, n, k), of the same batch, with $k <= n$ or $k <= 32$.
        adjoint: whether to solve with $A^T$ instead of $A$.

    Returns:
        The shape of ``B``.

    References:
        ATen linalg_lu_solve.
    """
    return torch.linalg.lu_solve(LU, pivots, B, adjoint=adjoint).contiguous()


def _by_columns(LU: Tensor, B: Tensor) -> bool:
    """Whether `solve_eliminated` is faster than LAPACK."""
    n, k = LU.shape[-1], B.shape[-1]
    return (
        LU.is_cpu
        and LU.dtype in (torch.float32, torch.float64)
        and LU.shape[:-2] == B.shape[:-2]
        and n <= _BY_COLUMNS
        and LIMITS["elimination_columns"] <= k <= max(n, LARGEST)
    )


@solve_again.impl("default")
def _(A: Tensor, LU: Tensor, pivots: Tensor, B: Tensor, left: bool, adjoint: bool) -> Tensor:
    if left and _by_columns(LU, B):
        return solve_eliminated(LU, pivots, B, adjoint)
    return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)


def _is_small(result: Tensor, A: Tensor, LU: Tensor, left: bool) -> bool:
    batch = LU.dim() - 2
    columns = 1 if _is_vector(LU, result) else result.shape[-1]
    one_batch = result.dim() <= LU.dim() and result.shape[:batch] == LU.shape[:batch]
    return left and one_batch and small(A, max(LU.shape[-1], columns), in_cache=_IN_CACHE)


@formula(kernels=Kernel("cpu", "cuda", when=_is_small), requires=pivots_fit)
def linalg_solve_backward(
    grad_result: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, left: bool
) -> tuple[Tensor, Tensor]:
    """Cotangents of $A$ and $B$, given that of the solution $X$: $gB = A^-H gX$, $gA = -gB X^H$; or mirrored.

    Args:
        grad_result: $gX$, cotangent of the solution, the shape of ``result``.
        result: $X$, the solution, (*, n, k), (*, k, n) if not ``left``, or (*, n) for vectors.

    Returns:
        $gA$, with all batch dims of ``result``, and $gB$, the shape of ``result``: no broadcast dim is summed.
    """
    if _is_vector(A, result):
        gA, gB = linalg_solve_backward(grad_result.unsqueeze(-1), result.unsqueeze(-1), A, LU, pivots, left)
        return gA, gB.squeeze(-1)
    gB = solve_again(A, LU, pivots, grad_result, left, True)
    return gB @ -result.mH if left else -result.mH @ gB, gB


def _is_small_for_tangents(dA: Tensor | None, dB: Tensor | None, X: Tensor, A: Tensor, LU: Tensor, left: bool) -> bool:
    one_batch = X.shape[:-2] == LU.shape[:-2] and all(d is None or d.shape == x.shape for d, x in ((dA, A), (dB, X)))
    largest = max(X.shape[-2:])
    return left and one_batch and largest <= _LARGEST_TANGENT and not _is_vector(A, X) and small(A, largest)


@formula(kernels=Kernel("cpu", "cuda", when=_is_small_for_tangents), requires=pivots_fit)
def linalg_solve_jvp(
    dA: Tensor | None, dB: Tensor | None, X: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, left: bool
) -> Tensor:
    """Tangent of the solution: $dX = A^-1 (dB - dA X)$, or $(dB - X dA) A^-1$.

    Args:
        X: the solution, (*, n, k), (*, k, n) if not ``left``, or (*, n) for vectors.

    Returns:
        The shape of ``X``.
    """
    return generic_solve_jvp(lambda R: solve_again(A, LU, pivots, R, left, False), X, A, dA, dB, left)


@formula
def solve_jvp(X: Tensor, A: Tensor, dA: Tensor | None, dB: Tensor | None) -> Tensor:
    """Tangent of $X = A^-1 B$ without saved factors: $A^-1 (dB - dA X)$.

    Returns:
        The shape of ``X``.

    Raises:
        LinAlgError: $A$ is singular.
    """
    return generic_solve_jvp(lambda R: torch.linalg.solve(_aligned(A, R), R), X, A, dA, dB)


@formula
def solve_backward_self(grad: Tensor, self: Tensor, A: Tensor) -> Tensor:
    """Cotangent of $B$, given that of the solution of $A X = B$: $A^-H gX$.

    Args:
        grad: cotangent of the solution, (*, n, k) or (*, n).
        self: $B$, (*, n, k) or (*, n).

    Returns:
        The shape of ``self``.

    Raises:
        LinAlgError: $A$ is singular.

    References:
        ATen solve_backward_self, which is declared and no longer defined.
    """
    vector = _is_vector(A, grad)
    if vector:
        grad = grad.unsqueeze(-1)
    gB = torch.linalg.solve(_aligned(A, grad).mH, grad)
    return summed_to(gB.squeeze(-1) if vector else gB, self.shape)


@formula
def solve_backward_A(grad: Tensor, self: Tensor, A: Tensor, solution: Tensor) -> Tensor:
    """Cotangent of $A$, given that of the solution of $A X = B$: $-(A^-H gX) X^H$.

    Args:
        grad: cotangent of the solution, its shape.
        self: $B$, which is not read.

    Returns:
        The shape of ``A``.

    Raises:
        LinAlgError: $A$ is singular.

    References:
        ATen solve_backward_A, which is declared and no longer defined.
    """
    if _is_vector(A, solution):
        grad, solution = grad.unsqueeze(-1), solution.unsqueeze(-1)
    return summed_to(torch.linalg.solve(_aligned(A, grad).mH, grad) @ -solution.mH, A.shape)


# For a real contiguous A, _linalg_solve_ex returns the factors of A^T in torch 2.10, and those of A since 2.13.
_GIVES_FACTORS_OF_A = torch.__version__ >= "2.13"


def _factors(A: Tensor, LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of $A$, given the outputs of the forward."""
    if _GIVES_FACTORS_OF_A:
        return LU, pivots
    factors = torch.linalg.lu_factor_ex(A.detach())
    return factors.LU, factors.pivots


def _solve_vjp(
    grad_result: Tensor,
    result: Tensor,
    A: Tensor,
    B_sizes: Sequence[int],
    LU: Tensor,
    pivots: Tensor,
    left: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor]:
    LU, pivots = _factors(A, LU, pivots)
    if output_mask[0]:
        gA, gB = linalg_solve_backward(grad_result, result, A, LU, pivots, left)
        return summed_to(gA, A.shape), summed_to(gB, B_sizes)
    # the product for gA is as much work as the solve
    vector = _is_vector(A, result)
    gB = solve_again(A, LU, pivots, grad_result.unsqueeze(-1) if vector else grad_result, left, True)
    return None, summed_to(gB.squeeze(-1) if vector else gB, B_sizes)


# -- the rules --------------------------------------------------------------------------------------------------------


solve_rule = rule(
    "aten::_linalg_solve_ex",
    vjp={("A", "B"): _solve_vjp},
    jvp={
        "result": lambda A_t, B_t, result, A, LU, pivots, left: linalg_solve_jvp(
            A_t, B_t, result, A, *_factors(A, LU, pivots), left
        )
    },
    compiled_vjp=(
        CompiledVjp(("A", "B"), linalg_solve_backward, {}, LARGEST, only={"left": True}, one_batch=("A", "result"))
        if _GIVES_FACTORS_OF_A
        else None
    ),
    not_differentiable=("LU", "pivots", "info"),
    improves={"values": "2.15"},
    source="ATen linalg_solve_backward, linalg_solve_jvp",
)
