"""Linear solves and inverses: _linalg_solve_ex, linalg_inv_ex, linalg_solve_triangular, triangular_solve.

For A X = B, differentiated, A dX + dA X = dB, so that

    dX = A^-1 (dB - dA X),        gB = A^-H gX,        gA = -gB X^H,

and mirrored for X A = B: dX = (dB - X dA) A^-1, gB = gX A^-H, gA = -X^H gB. A triangular solve reads one triangle of A,
without the diagonal if it takes that as ones: dA and gA are restricted to what is read. With B = I this is the inverse.
Batch dims broadcast; a gradient is summed back to the shape of its input.

The LU factors that _linalg_solve_ex saves are no differentiable outputs, and constants to every derivative: what uses
them is `solve_again`, whose own derivative is that of a solve with A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.formula import Kernel, formula
from torch_manualgrad.core.rule import ButManySmall, Sample, rule

from .common import random, random_conditioned, small

# Up to which side the kernels for tangents are faster than BLAS, by measurement.
_INVERSE_TANGENT, _SOLVE_TANGENT = 8, 16


# PyTorch's reverse derivative of the inverse is right; on the CPU ours is faster for many small matrices, by measurement.
_INVERSE_IS_LEFT = ButManySmall(order=8, matrices=600)


def summed_to(gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """A gradient in the shape of the input that was broadcast."""
    return gradient if gradient.shape == sizes else gradient.sum_to_size(sizes)


def _is_vector(A: Tensor, X: Tensor) -> bool:
    """Whether the solution X is one vector for each matrix; with matrices as right-hand sides X has all batch dims."""
    return X.dim() < A.dim()


def _aligned(A: Tensor, B: Tensor) -> Tensor:
    """A with as many dims as B, columns: torch.vmap of a solve is wrong where these numbers differ."""
    return A[(None,) * (B.dim() - A.dim())]


def _projected(A: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    """What a triangular solve reads of A."""
    return A.triu(int(unitriangular)) if upper else A.tril(-int(unitriangular))


def solve_triangular_adjoint(
    A: Tensor, G: Tensor, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """A^-H G, or G A^-H, for a triangular A."""
    if left and 2 * G.shape[-1] >= G.shape[-2]:  # many columns: BLAS is faster from the right, (G^H A^-1)^H
        return torch.linalg.solve_triangular(A, G.mH, upper=upper, left=False, unitriangular=unitriangular).mH
    return torch.linalg.solve_triangular(A.mH, G, upper=not upper, left=left, unitriangular=unitriangular)


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
    assert R is not None  # nobody asks for a tangent where no input has one
    dX = solve(R)
    return dX.squeeze(-1) if vector else dX


@formula(kernel=("default",))
def solve_again(A: Tensor, LU: Tensor, pivots: Tensor, B: Tensor, left: bool, adjoint: bool) -> Tensor:
    """A^-1 B from the factors of A that a solve left behind; the derivative is that of the solve with A.

    Args:
        A: (*, n, n). LU, pivots: its factors, as linalg_lu_factor returns them.
        B: (*, n, k), or (*, k, n) if not ``left``; all batch dims.
        left: False for B A^-1.
        adjoint: A^H in place of A.
    Returns:
        The shape of ``B``. The solution is inf or nan where A is singular.
    Source: ATen linalg_lu_solve, as linalg_solve_backward and linalg_solve_jvp call it.
    """
    A = _aligned(A, B)
    return torch.linalg.solve_ex(A.mH if adjoint else A, B, left=left).result


@solve_again.impl("default")
def _(A: Tensor, LU: Tensor, pivots: Tensor, B: Tensor, left: bool, adjoint: bool) -> Tensor:
    return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)


def _solve_is_small(X: Tensor, A: Tensor, LU: Tensor, left: bool) -> bool:
    one_batch = X.dim() == LU.dim() and X.shape[:-2] == LU.shape[:-2]
    return left and one_batch and small(A, max(X.shape[-2:]), in_cache=64)


@formula(kernels=Kernel("cpu", "cuda", when=_solve_is_small))
def linalg_solve_backward(
    gX: Tensor, X: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, left: bool
) -> tuple[Tensor, Tensor]:
    """Cotangents of A and B for that of the solution: gB = A^-H gX, gA = -gB X^H; with ``left`` False, mirrored.

    Args:
        gX: cotangent of the solution.
        X: the solution, (*, n, k), (*, k, n) if not ``left``, or (*, n) for vectors.
        A: (*, n, n). LU, pivots: its factors; constants to higher derivatives, which solve with A again.
        left: whether A X = B, else X A = B.
    Returns:
        gA, with all batch dims of X, and gB, the shape of ``X``: what was broadcast is not summed.
    Raises:
        Nothing where A is singular: there the gradients are inf or nan, in that matrix of the batch alone.
    Source: ATen linalg_solve_backward.
    """
    if _is_vector(A, X):
        gA, gB = linalg_solve_backward(gX.unsqueeze(-1), X.unsqueeze(-1), A, LU, pivots, left)
        return gA, gB.squeeze(-1)
    gB = solve_again(A, LU, pivots, gX, left, True)
    return gB @ -X.mH if left else -X.mH @ gB, gB


def _solve_tangent_is_small(dA: Tensor | None, dB: Tensor | None, X: Tensor, A: Tensor, LU: Tensor, left: bool) -> bool:
    one_batch = X.shape[:-2] == LU.shape[:-2] and all(d is None or d.shape == x.shape for d, x in ((dA, A), (dB, X)))
    side = max(X.shape[-2:])
    return left and one_batch and side <= _SOLVE_TANGENT and not _is_vector(A, X) and small(A, side)


@formula(kernels=Kernel("cpu", "cuda", when=_solve_tangent_is_small))
def linalg_solve_jvp(
    dA: Tensor | None, dB: Tensor | None, X: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, left: bool
) -> Tensor:
    """Tangent of the solution: dX = A^-1 (dB - dA X), or (dB - X dA) A^-1.

    Args:
        dA, dB: the tangents, of the shapes of the inputs; None is zero, one of them is given.
        X, A, LU, pivots, left: as linalg_solve_backward.
    Returns:
        The shape of ``X``.
    Raises: Nothing, as linalg_solve_backward. Source: ATen linalg_solve_jvp.
    """
    return generic_solve_jvp(lambda R: solve_again(A, LU, pivots, R, left, False), X, A, dA, dB, left)


@formula
def solve_jvp(X: Tensor, A: Tensor, dA: Tensor | None, dB: Tensor | None) -> Tensor:
    """Tangent of X = A^-1 B where no factors were saved: A^-1 (dB - dA X).

    Args:
        X: the solution, (*, n, k) or (*, n). A: (*, n, n).
        dA, dB: the tangents; None is zero, one of them is given.
    Returns:
        The shape of ``X``.
    Raises:
        LinAlgError: A is singular.
    Source: ATen solve_jvp.
    """
    return generic_solve_jvp(lambda R: torch.linalg.solve(_aligned(A, R), R), X, A, dA, dB)


@formula
def solve_backward_self(grad: Tensor, self: Tensor, A: Tensor) -> Tensor:
    """Cotangent of the right-hand side of A X = B: A^-H gX.

    Args:
        grad: cotangent of the solution, (*, n, k) or (*, n).
        self: B. A: (*, n, n).
    Returns:
        The shape of ``self``.
    Raises:
        LinAlgError: A is singular.
    Source: declared by ATen, which has no definition of it any more.
    """
    vector = _is_vector(A, grad)
    if vector:
        grad = grad.unsqueeze(-1)
    gB = torch.linalg.solve(_aligned(A, grad).mH, grad)
    return summed_to(gB.squeeze(-1) if vector else gB, self.shape)


@formula
def solve_backward_A(grad: Tensor, self: Tensor, A: Tensor, solution: Tensor) -> Tensor:
    """Cotangent of the matrix of A X = B: -(A^-H gX) X^H.

    Args:
        grad: cotangent of the solution, its shape.
        self: B, which is not used. A: (*, n, n).
        solution: X, (*, n, k) or (*, n).
    Returns:
        The shape of ``A``.
    Raises:
        LinAlgError: A is singular.
    Source: declared by ATen, which has no definition of it any more.
    """
    if _is_vector(A, solution):
        grad, solution = grad.unsqueeze(-1), solution.unsqueeze(-1)
    return summed_to(torch.linalg.solve(_aligned(A, grad).mH, grad) @ -solution.mH, A.shape)


def _inverse_is_small(inverse: Tensor) -> bool:
    n = inverse.shape[-1]
    # BLAS multiplies larger batches of larger matrices faster, by measurement
    return small(inverse, n, in_cache=48) and (n <= 8 or inverse.numel() < 16 * n * n)


@formula(kernels=Kernel("cpu", "cuda", when=_inverse_is_small))
def linalg_inv_backward(grad_inverse: Tensor, inverse: Tensor) -> Tensor:
    """Cotangent of A for that of its inverse X: -X^H gX X^H, (*, n, n).

    Source: ATen's derivatives.yaml, linalg_inv_ex.
    """
    XH = inverse.mH
    return -XH @ (grad_inverse @ XH)


def _inverse_tangent_is_small(inverse: Tensor) -> bool:
    return inverse.shape[-1] <= _INVERSE_TANGENT and small(inverse, inverse.shape[-1])


@formula(kernels=Kernel("cpu", "cuda", when=_inverse_tangent_is_small))
def linalg_inv_jvp(A_t: Tensor, inverse: Tensor) -> Tensor:
    """Tangent of the inverse X of A: -X dA X, (*, n, n).

    Source: ATen's derivatives.yaml, linalg_inv_ex.
    """
    return -inverse @ (A_t @ inverse)


def _triangular_is_small(A: Tensor, X: Tensor) -> bool:
    # at every side that the kernel takes it is as fast as BLAS or faster, by measurement
    return A.shape[:-2] == X.shape[:-2] and small(A, max(X.shape[-2:]))


@formula(kernels=Kernel("cpu", "cuda", when=_triangular_is_small))
def linalg_solve_triangular_backward(
    grad: Tensor, A: Tensor, X: Tensor, upper: bool, left: bool, unitriangular: bool
) -> tuple[Tensor, Tensor]:
    """Cotangents of A and B for that of the solution: gB = A^-H gX, gA = -gB X^H in the triangle; mirrored on the right.

    Args:
        grad: cotangent of the solution, its shape.
        A: (*, n, n), of which one triangle is read.
        X: the solution, (*, n, k), or (*, k, n) if not ``left``.
        upper: which triangle. left: whether A X = B, else X A = B. unitriangular: whether the diagonal counts as ones.
    Returns:
        gA, with all batch dims of X and zero outside of what is read, and gB, the shape of ``X``.
    Raises:
        Nothing where A is singular: there the gradients are inf or nan.
    Source: ATen linalg_solve_triangular_backward.
    """
    gB = solve_triangular_adjoint(A, grad, upper, left, unitriangular)
    gA = gB @ -X.mH if left else -X.mH @ gB
    return _projected(gA, upper, unitriangular), gB


@formula
def linalg_solve_triangular_forward_AD(
    A_t: Tensor | None, B_t: Tensor | None, A: Tensor, X: Tensor, upper: bool, left: bool, unitriangular: bool
) -> Tensor:
    """Tangent of the solution: A^-1 (dB - dA X), or (dB - X dA) A^-1, with dA restricted to what is read of A.

    Args:
        A_t, B_t: the tangents, of the shapes of the inputs; None is zero, one of them is given.
        A, X, upper, left, unitriangular: as linalg_solve_triangular_backward.
    Returns:
        The shape of ``X``.
    Raises: Nothing, as linalg_solve_triangular_backward. Source: ATen linalg_solve_triangular_forward_AD.
    """
    if A_t is not None:
        A_t = _projected(A_t, upper, unitriangular)

    def solve(R: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(A, R, upper=upper, left=left, unitriangular=unitriangular)

    return generic_solve_jvp(solve, X, A, A_t, B_t, left)


@formula
def triangular_solve_backward(
    grad_x: Tensor | None,
    grad_m: Tensor | None,
    b: Tensor,
    a: Tensor,
    x: Tensor,
    upper: bool,
    transpose: bool,
    unitriangular: bool,
) -> tuple[Tensor, Tensor]:
    """Cotangents of B and A for those of the solution of A X = B and of the copy of A that is returned with it.

    Args:
        grad_x, grad_m: cotangents of the solution and the copy; None is zero.
        b: B, (*, n, k). a: A, (*, n, n), of which one triangle is read. x: the solution, with all batch dims.
        upper: which triangle. transpose: A^T (not A^H) in place of A. unitriangular: whether the diagonal counts as ones.
    Returns:
        The shapes of ``b`` and ``a``; that of ``grad_m`` is added to the latter, in both triangles.
    Raises: Nothing, as linalg_solve_triangular_backward. Source: ATen triangular_solve_backward.
    """
    if grad_x is None:
        return torch.zeros_like(b), torch.zeros_like(a) if grad_m is None else summed_to(grad_m, a.shape)
    T = a.mT if transpose else a
    gT, gB = linalg_solve_triangular_backward(grad_x, T, x, upper != transpose, True, unitriangular)
    gA = gT.mT if transpose else gT
    return summed_to(gB, b.shape), summed_to(gA if grad_m is None else gA + grad_m, a.shape)


@formula
def triangular_solve_jvp(
    X: Tensor, A: Tensor, dA: Tensor | None, dB: Tensor | None, upper: bool, transpose: bool, unitriangular: bool
) -> Tensor:
    """Tangent of the solution of A X = B: that of linalg_solve_triangular, for A or its transpose.

    Args:
        X, A, upper, transpose, unitriangular: as triangular_solve_backward.
        dA, dB: the tangents, of the shapes of the inputs; None is zero, one of them is given.
    Returns:
        The shape of ``X``.
    Raises: Nothing, as linalg_solve_triangular_backward. Source: ATen triangular_solve_jvp, which leaves out the transpose
        and the restriction of dA.
    """
    if transpose:
        A, dA = A.mT, None if dA is None else dA.mT
    return linalg_solve_triangular_forward_AD(dA, dB, A, X, upper != transpose, True, unitriangular)


# 2.10 returns the factors of A^T from _linalg_solve_ex where A is real and contiguous; 2.13 those of A.
_GIVES_FACTORS_OF_A = torch.__version__ >= "2.13"


def _factors(A: Tensor, LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of A, given what the forward returned."""
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
    vector = _is_vector(A, result)
    if vector:
        grad_result, result = grad_result.unsqueeze(-1), result.unsqueeze(-1)
    if output_mask[0]:
        gA, gB = linalg_solve_backward(grad_result, result, A, LU, pivots, left)
        gA = summed_to(gA, A.shape)
    else:  # the product for gA is as much work as the solve
        gA, gB = None, solve_again(A, LU, pivots, grad_result, left, True)
    return gA, summed_to(gB.squeeze(-1) if vector else gB, B_sizes)


def _solve_triangular_vjp(
    grad: Tensor,
    self: Tensor,
    B_sizes: Sequence[int],
    result: Tensor,
    upper: bool,
    left: bool,
    unitriangular: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor]:
    if not output_mask[0]:
        return None, summed_to(solve_triangular_adjoint(self, grad, upper, left, unitriangular), B_sizes)
    gA, gB = linalg_solve_triangular_backward(grad, self, result, upper, left, unitriangular)
    return summed_to(gA, self.shape), summed_to(gB, B_sizes)


def _solve_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def matrices(*shape: int) -> Tensor:
        return random_conditioned(*shape, dtype=dtype, device=device)

    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    yield Sample(matrices(3, 3), right(3, 2))
    yield Sample(matrices(3, 3).mT, right(2, 3), left=False)
    yield Sample(matrices(3, 3), right(3))
    yield Sample(matrices(2, 3, 3), right(2, 3))
    yield Sample(matrices(1, 3, 3), right(2, 3, 1))
    yield Sample(matrices(2, 1, 2, 2), right(1, 3, 2, 2), left=False)
    yield Sample(matrices(2, 0, 0), right(1, 0, 2))


def _solution(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """A probe: LU and pivots depend on A, but are not differentiable outputs."""
    return torch.ops.aten._linalg_solve_ex(A, B, left=left)[0]


def _inv_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (0, 2, 2)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))


def _triangular(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Both triangles well away from singular; each sample reads one."""
    X = random(*shape, dtype=dtype, seed=2)
    return (X + 2.0 * torch.diag_embed(X.diagonal(dim1=-2, dim2=-1).sgn())).to(device)


def _solve_triangular_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    A = _triangular(3, 3, dtype=dtype, device=device)
    for upper in (True, False):
        yield Sample(A, right(3, 2), upper=upper)
        yield Sample(A, right(1, 3), upper=upper, left=False, unitriangular=not upper)
    yield Sample(A, right(3, 1), upper=False, unitriangular=True)
    yield Sample(_triangular(2, 1, 3, 3, dtype=dtype, device=device), right(2, 3, 3), upper=True)
    yield Sample(A.mT, right(2, 3, 1), upper=False)
    yield Sample(_triangular(2, 0, 0, dtype=dtype, device=device), right(0, 2), upper=False)


def _legacy_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    B = random(3, 2, dtype=dtype, device=device, seed=1)
    A = _triangular(3, 3, dtype=dtype, device=device)
    for upper in (True, False):
        for transpose in (True, False):
            yield Sample(B, A, upper, transpose, upper == transpose)
    yield Sample(B, _triangular(2, 3, 3, dtype=dtype, device=device))
    yield Sample(random(2, 3, 1, dtype=dtype, device=device), A, False, True)


rule(
    "aten::_linalg_solve_ex",
    vjp={("A", "B"): _solve_vjp},
    jvp={
        "result": lambda A_t, B_t, result, A, LU, pivots, left: linalg_solve_jvp(
            A_t, B_t, result, A, *_factors(A, LU, pivots), left
        )
    },
    uses=(linalg_solve_backward, solve_again, linalg_solve_jvp),
    not_differentiable=("LU", "pivots", "info"),
    improves={"values": "2.15"},
    source="ATen linalg_solve_backward, linalg_solve_jvp",
    samples=_solve_samples,
    probe=_solution,
)
rule(
    "aten::linalg_inv_ex",
    vjp={"A": linalg_inv_backward},
    jvp={"inverse": linalg_inv_jvp},
    improves="speed",
    source="ATen's derivatives.yaml, linalg_inv_ex",
    samples=_inv_samples,
    defer_to_stock=_INVERSE_IS_LEFT,
)
rule(
    "aten::linalg_solve_triangular",
    vjp={("self", "B"): _solve_triangular_vjp},
    jvp={
        "result": lambda self_t, B_t, self, result, upper, left, unitriangular: linalg_solve_triangular_forward_AD(
            self_t, B_t, self, result, upper, left, unitriangular
        )
    },
    uses=(linalg_solve_triangular_backward, linalg_solve_triangular_forward_AD),
    source="ATen linalg_solve_triangular_backward, linalg_solve_triangular_forward_AD",
    samples=_solve_triangular_samples,
)
rule(
    "aten::triangular_solve",
    vjp={
        (
            "self",
            "A",
        ): lambda grad_solution, grad_cloned_coefficient, self, A, solution, upper, transpose, unitriangular: (
            triangular_solve_backward(
                grad_solution, grad_cloned_coefficient, self, A, solution, upper, transpose, unitriangular
            )
        )
    },
    jvp={
        "solution": lambda solution, A, A_t, self_t, upper, transpose, unitriangular: triangular_solve_jvp(
            solution, A, A_t, self_t, upper, transpose, unitriangular
        ),
        "cloned_coefficient": lambda A_t, cloned_coefficient: (
            None if A_t is None else A_t.expand(cloned_coefficient.shape)
        ),
    },
    uses=(triangular_solve_backward, triangular_solve_jvp),
    improves="values",
    source="ATen triangular_solve_backward, triangular_solve_jvp",
    samples=_legacy_samples,
)
