"""Triangular solves: linalg_solve_triangular, triangular_solve.

The derivatives are those of a solve with any matrix (see solve.py), restricted to the entries that are read: one
triangle of $A$, without the diagonal if that counts as ones. $dA$ and $gA$ are zero elsewhere. For $A X = B$,

    $dX = A^-1 (dB - dA X)$,        $gB = A^-H gX$,        $gA = -gB X^H$ in the triangle,

and mirrored for $X A = B$. Batch dims broadcast; a gradient is summed back to the shape of its input.

Args:
    A: (*, n, n). One triangle is read.
    upper: whether the upper triangle is read.
    left: whether $A X = B$, else $X A = B$.
    unitriangular: whether the diagonal counts as ones.
    solution: $X$, (*, n, k), with all batch dims.
    transpose: whether to solve with $A^T$ (not $A^H$) instead of $A$.

Note:
    Where not differentiable: where $A$ is singular. The results are inf or nan, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from .common import small, summed_to
from .solve import generic_solve_jvp


def solve_triangular_adjoint(
    A: Tensor, G: Tensor, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """$A^-H G$, or $G A^-H$, for a triangular $A$."""
    if left and 2 * G.shape[-1] >= G.shape[-2]:  # many columns: BLAS is faster from the right, (G^H A^-1)^H
        return torch.linalg.solve_triangular(A, G.mH, upper=upper, left=False, unitriangular=unitriangular).mH
    return torch.linalg.solve_triangular(A.mH, G, upper=not upper, left=left, unitriangular=unitriangular)


def _read(A: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    """The entries of $A$ that a triangular solve reads, with zeros elsewhere."""
    return A.triu(int(unitriangular)) if upper else A.tril(-int(unitriangular))


def _is_small(A: Tensor, X: Tensor) -> bool:
    # at every order that the kernel takes, it is as fast as BLAS or faster
    return A.shape[:-2] == X.shape[:-2] and small(A, max(X.shape[-2:]))


@formula(kernels=Kernel("cpu", "cuda", when=_is_small))
def linalg_solve_triangular_backward(
    grad: Tensor, A: Tensor, X: Tensor, upper: bool, left: bool, unitriangular: bool
) -> tuple[Tensor, Tensor]:
    """Cotangents of $A$ and $B$, given that of the solution: $gB = A^-H gX$, $gA = -gB X^H$ in the triangle.

    Args:
        grad: cotangent of the solution, the shape of ``X``.
        X: the solution, (*, n, k), or (*, k, n) if not ``left``.

    Returns:
        $gA$, with all batch dims of $X$ and zero in entries that are not read, and $gB$, the shape of ``X``.
    """
    gB = solve_triangular_adjoint(A, grad, upper, left, unitriangular)
    gA = gB @ -X.mH if left else -X.mH @ gB
    return _read(gA, upper, unitriangular), gB


@formula
def linalg_solve_triangular_forward_AD(
    self_t: Tensor | None,
    B_t: Tensor | None,
    self: Tensor,
    result: Tensor,
    upper: bool,
    left: bool,
    unitriangular: bool,
) -> Tensor:
    """Tangent of the solution: $A^-1 (dB - dA X)$, or $(dB - X dA) A^-1$, with the entries of $dA$ that are read.

    Args:
        self_t: tangent of $A$, (*, n, n); None for zero.
        B_t: tangent of $B$, its shape; None for zero. One of the two is given.
        self: $A$, (*, n, n).
        result: $X$, (*, n, k), or (*, k, n) if not ``left``.

    Returns:
        The shape of ``result``.
    """
    if self_t is not None:
        self_t = _read(self_t, upper, unitriangular)

    def solve(R: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self, R, upper=upper, left=left, unitriangular=unitriangular)

    return generic_solve_jvp(solve, result, self, self_t, B_t, left)


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


@formula
def triangular_solve_backward(
    grad_solution: Tensor | None,
    grad_cloned_coefficient: Tensor | None,
    self: Tensor,
    A: Tensor,
    solution: Tensor,
    upper: bool,
    transpose: bool,
    unitriangular: bool,
) -> tuple[Tensor, Tensor]:
    """Cotangents of $B$ and $A$, given those of the solution of $A X = B$ and of the returned copy of $A$.

    Args:
        grad_solution: cotangent of the solution, the shape of ``solution``; None for zero.
        grad_cloned_coefficient: cotangent of the copy, (*, n, n); None for zero. It is added in both triangles.
        self: $B$, (*, n, k).

    Returns:
        The shapes of ``self`` and ``A``.
    """
    if grad_solution is None:
        gA = torch.zeros_like(A) if grad_cloned_coefficient is None else summed_to(grad_cloned_coefficient, A.shape)
        return torch.zeros_like(self), gA
    T = A.mT if transpose else A
    gT, gB = linalg_solve_triangular_backward(grad_solution, T, solution, upper != transpose, True, unitriangular)
    gA = gT.mT if transpose else gT
    if grad_cloned_coefficient is not None:
        gA = gA + grad_cloned_coefficient
    return summed_to(gB, self.shape), summed_to(gA, A.shape)


@formula
def triangular_solve_jvp(
    solution: Tensor,
    A: Tensor,
    A_t: Tensor | None,
    self_t: Tensor | None,
    upper: bool,
    transpose: bool,
    unitriangular: bool,
) -> Tensor:
    """Tangent of the solution of $A X = B$: the tangent of linalg_solve_triangular, for $A$ or its transpose.

    Args:
        A_t: tangent of $A$, (*, n, n); None for zero.
        self_t: tangent of $B$, its shape; None for zero. One of the two is given.

    Returns:
        The shape of ``solution``.

    References:
        ATen triangular_solve_jvp, which leaves out the transpose and the restriction of dA.
    """
    if transpose:
        A, A_t = A.mT, None if A_t is None else A_t.mT
    return linalg_solve_triangular_forward_AD(A_t, self_t, A, solution, upper != transpose, True, unitriangular)


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::linalg_solve_triangular",
    vjp={("self", "B"): _solve_triangular_vjp},
    jvp={"result": linalg_solve_triangular_forward_AD},
    source="ATen linalg_solve_triangular_backward, linalg_solve_triangular_forward_AD",
)
rule(
    "aten::triangular_solve",
    vjp={("self", "A"): triangular_solve_backward},
    jvp={
        "solution": triangular_solve_jvp,
        "cloned_coefficient": lambda A_t, cloned_coefficient: A_t.expand(cloned_coefficient.shape),
    },
    improves="values",
    source="ATen triangular_solve_backward, triangular_solve_jvp",
)
