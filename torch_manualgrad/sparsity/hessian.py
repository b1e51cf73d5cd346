"""Sparse Hessians, and blocks of those of separable functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked, described
from ..core.internals import transforms_in_dual_level
from ..core.override.override import under_active_rules
from .coloring import Ordering, colored
from .compression import Compression, chunk_for
from .constants import Constants
from .detection import detached, detect
from .layouts import Layout
from .pattern import Pattern, pattern_of
from .plan import Plan, called, check_input, compare, outside_of_transforms
from .substitution import Substitution
from .trace import PatternError

__all__ = ["HessianPlan", "SparseHessian", "hessian_blocks", "sparse_hessian"]

_BYTES = 64  # of a product per byte of x, if no trace has measured it
Mode = Literal["auto", "fwd-rev", "rev-rev"]
Coloring = Literal["star", "acyclic", "columns"]


def _gradient(f: Callable[..., Any], args: Any) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(under_active_rules(lambda x: f(x, *args)))


def _product(f: Callable[..., Any], x: Tensor, args: Any, mode: str) -> Callable[[Tensor], Tensor]:
    """The product of the Hessian at a point with a vector."""
    gradient = _gradient(f, args)
    if mode == "fwd-rev":
        return lambda v: torch.func.jvp(gradient, (x,), (v,))[1]
    pair: Any = torch.func.vjp(gradient, x)
    return lambda v: pair[1](v)[0]


class HessianPlan(Plan):
    """A Hessian that is prepared once and evaluated often, made by `mg.sparse_hessian.prepare`.

    Attributes:
        shape: of the COO tensor: twice that of ``x``.
        mode: "fwd-rev", products by the jvp of the gradient, or "rev-rev", by its vjp.
        colors: the number of colors, and of products.
        coloring: the color of each element of ``x``.
        conservative: the operators assumed to mix all of their inputs, and how often each was called.
        chunk_size: how many products are computed at once.
        steps: the number of sequential steps to the last entry; 1 unless the coloring is acyclic.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        x: Tensor,
        pattern: Pattern,
        conservative: dict[str, int],
        constants: Constants | None,
        mode: str,
        kind: Coloring,
        coloring: Tensor,
        chunk: Callable[[int], int],
    ) -> None:
        super().__init__(f, x, pattern, (*x.shape, *x.shape), conservative, constants)
        self.mode, self.coloring = mode, coloring
        self.colors = int(coloring.max()) + 1 if coloring.numel() and pattern.nnz else 0
        self.chunk_size = chunk(self.colors)
        self._substitution = Substitution(pattern, coloring, kind, x.device)
        read = (self._substitution.color, self._substitution.place)
        self._compression = Compression(coloring, self.colors, self.chunk_size, *read, x.device)
        self.steps = self._substitution.steps

    def values(self, x: Tensor, *args: Any) -> Tensor:
        """The nonzeros of the Hessian at a point, differentiable in all modes and under vmap.

        Args:
            x: the shape, dtype and device that the plan was prepared for.
            args: further arguments of ``f``; values are differentiable in these too.

        Returns:
            (nnz), in the order of ``rows`` and ``columns``; both triangles.

        Raises:
            TypeError: ``x`` is not a dense tensor.
            ValueError: another shape, dtype or device, or another integer among the arguments.
        """
        x = self._checked(x, args)
        if not self.colors:
            return x.reshape(-1)[:0] * 0
        product = _product(self._f, x, args, self.mode)
        return self._substitution(self._compression(product, x))


def _check_output(y: Tensor) -> None:
    if y.numel() != 1 or y.dim() or y.is_complex():
        raise ArgumentError(f"f: expected a function that returns a real tensor without dims, got {described(y)}")


class SparseHessian:
    """`mg.sparse_hessian`: Hessians with few nonzeros, from a few products.

    Call it with a function, or prepare a plan: ``mg.sparse_hessian(f)(x)``, ``mg.sparse_hessian.prepare(f, x)``.
    """

    @checked
    @called("sparse_hessian")
    def __call__(
        self,
        f: Callable[..., Any],
        *,
        mode: Mode = "auto",
        pattern: object = None,
        coloring: Coloring = "star",
        ordering: Ordering = "auto",
        check: bool | None = None,
        layout: Layout = "coo",
        blocksize: tuple[int, int] | None = None,
        chunk_size: int | None = None,
    ) -> Callable[..., Any]:
        """A function that returns the Hessian of another as a sparse matrix.

        Each call finds the pattern and colors again. `prepare` does this once.

        Args:
            f: ``f(x, *args)``, real and without dims, of a real tensor and constants.
            mode: how products with the Hessian are computed: "fwd-rev", by the jvp of the gradient, or "rev-rev", by its
                vjp. "auto" is the first, if ``f`` has it.
            pattern: (n, n), symmetric, the entries that may be nonzero; as in `mg.sparse_jacobian`.
            coloring: "star", "acyclic", with fewer colors, which computes entries sequentially, or "columns",
                which does not use symmetry.
            ordering: as in `mg.sparsity.color`.
            check: as in `mg.sparse_jacobian`.
            layout: as in `mg.sparse_jacobian`; a COO tensor has the shape of ``x`` twice.
            blocksize: of "bsr".
            chunk_size: as in `mg.sparse_jacobian`.

        Returns:
            ``hessian(x, *args)``, the sparse matrix. In reverse mode derivatives go through its values.

        Raises:
            TypeError: an argument is not of its type, or ``x`` is complex.
            ValueError: a name is unknown, ``f`` returns another shape, or ``pattern`` is not symmetric.
            PatternError: no pattern can be found, or the check fails.
        """

        def hessian(x: Tensor, *args: Any) -> Any:
            outside_of_transforms(check_input(x), "sparse_hessian")
            plan = self.prepare(
                f,
                x,
                *args,
                mode=mode,
                pattern=pattern,
                coloring=coloring,
                ordering=ordering,
                check=check,
                chunk_size=chunk_size,
            )
            return plan.matrix(x, *args, layout=layout, blocksize=blocksize)

        return hessian

    @checked
    @called("sparse_hessian.prepare")
    def prepare(
        self,
        f: Callable[..., Any],
        x: Tensor,
        *args: Any,
        mode: Mode = "auto",
        pattern: object = None,
        coloring: Coloring = "star",
        ordering: Ordering = "auto",
        check: bool | None = None,
        chunk_size: int | None = None,
    ) -> HessianPlan:
        """A plan for points with the shape, dtype and device of ``x``.

        Args:
            f: as in `mg.sparse_hessian`.
            x: an example; its values do not matter.
            args: further arguments of ``f``. The pattern may depend on those that are integers, such as indices.
            mode: as in `mg.sparse_hessian`.
            pattern: as in `mg.sparse_hessian`.
            coloring: as in `mg.sparse_hessian`.
            ordering: as in `mg.sparse_hessian`.
            check: as in `mg.sparse_jacobian`, at ``x``.
            chunk_size: as in `mg.sparse_jacobian`.

        Returns:
            The plan.

        Raises:
            TypeError: an argument is not of its type, or ``x`` is complex.
            ValueError: as in `mg.sparse_hessian`.
            PatternError: no pattern can be found, or the check fails.
        """
        x = check_input(x)
        outside_of_transforms(x, "sparse_hessian")
        if x.is_complex():
            raise TypeError(f"x: expected a real tensor, got {described(x)}")
        if chunk_size is not None and chunk_size < 1:
            raise ArgumentError(f"chunk_size: expected a positive number, got {chunk_size}")
        x, args = x.detach(), tuple(detached(args))
        # a given pattern may hold for other arguments too
        constants = Constants(args) if pattern is None else None
        if pattern is None:
            found = detect(f, x, args, second=True)
            _check_output(found.output)
            structure, conservative, size = found.pattern, found.conservative, 4 * found.bytes
        else:
            structure, conservative = pattern_of(pattern, "pattern", (x.numel(), x.numel())), {}
            if not structure.is_symmetric():
                raise ArgumentError(f"pattern: expected a symmetric pattern, got one of shape {list(structure.shape)}")
            size = _BYTES * x.numel() * x.element_size()
        if mode == "auto":
            mode = "fwd-rev" if _has_forward(f, x, args) else "rev-rev"
        colors = colored(structure, coloring, ordering)
        plan = HessianPlan(
            f, x, structure, conservative, constants, mode, coloring, colors, lambda n: chunk_for(n, size, chunk_size)
        )
        if check if check is not None else pattern is not None:
            _check_products(plan, x, args)
        return plan


def _has_forward(f: Callable[..., Any], x: Tensor, args: Any) -> bool:
    """Whether the gradient has a jvp."""
    try:
        with transforms_in_dual_level():
            torch.func.jvp(_gradient(f, args), (x,), (torch.zeros_like(x),))
    except NotImplementedError:
        return False
    return True


def _check_products(plan: HessianPlan, x: Tensor, args: Any, count: int = 2) -> None:
    generator = torch.Generator(device="cpu").manual_seed(0)
    values, row, col = plan.values(x, *args), plan.rows.to(x.device), plan.columns.to(x.device)
    product = _product(plan._f, x, args, plan.mode)
    for _ in range(count):
        v = torch.randn(x.shape, dtype=x.dtype, generator=generator, device="cpu").to(x.device)
        terms = values * v.reshape(-1)[col]
        zero = x.new_zeros(x.numel())
        compare(zero.index_add(0, row, terms), product(v).reshape(-1), zero.index_add(0, row, terms.abs()), "rows")


sparse_hessian = SparseHessian()


@checked
def hessian_blocks(f: Callable[..., Any], *, mode: Mode = "auto", check: bool = True) -> Callable[..., Any]:
    """A function that returns the diagonal blocks of the Hessian of a separable function.

    A function is separable over the first dim of ``x`` if $f(x) = sum_i g_i(x_i)$. Its Hessian then consists of one
    block for each $x_i$, and all blocks together take one product per column of a block.

    Args:
        f: ``f(x, *args)``, real and without dims.
        mode: as in `mg.sparse_hessian`.
        check: whether to find the pattern of the Hessian, and to raise if it has entries outside of the blocks.

    Returns:
        ``blocks(x, *args)``: for ``x`` of shape (b, *s), a dense tensor (b, *s, *s), differentiable in all modes and
        under vmap, which requires ``check=False``.

    Raises:
        TypeError: an argument is not of its type, or ``x`` is not real.
        ValueError: ``f`` returns another shape, or ``x`` has no dims.
        PatternError: the function is not separable, or no pattern can be found.
    """

    def blocks(x: Tensor, *args: Any) -> Tensor:
        x = check_input(x)
        if x.is_complex() or not x.dim():
            raise TypeError(f"x: expected a real tensor with a batch dim, got {described(x)}")
        size = x[0].numel() if len(x) else 0
        if not x.numel():
            return x.new_zeros(*x.shape, *x.shape[1:])
        if check:
            outside_of_transforms(x, "hessian_blocks, with check=True")
            found = detect(f, x, tuple(detached(args)), second=True)
            _check_output(found.output)
            row, col = found.pattern.row(), found.pattern.col
            outside = torch.div(row, size, rounding_mode="floor") != torch.div(col, size, rounding_mode="floor")
            if bool(outside.any()):
                pair = (int(row[outside][0]) // size, int(col[outside][0]) // size)
                raise PatternError(
                    f"f: not separable over the first dim of x: the second derivative in x[{pair[0]}] and x[{pair[1]}] may "
                    "be nonzero. check=False returns the blocks of the sums over all of these"
                )
        how = mode if mode != "auto" else "fwd-rev" if _has_forward(f, x, args) else "rev-rev"
        # one product gives a column of every block, with all its rows
        entry = torch.arange(x.numel() * size, device="cpu").reshape(len(x), size, size)
        column, row = entry % size, torch.div(entry, size, rounding_mode="floor")
        coloring = torch.arange(size, device="cpu").repeat(len(x))
        chunk = chunk_for(size, _BYTES * x.numel() * x.element_size(), None)
        compression = Compression(coloring, size, chunk, column.reshape(-1), row.reshape(-1), x.device)
        return compression(_product(f, x, args, how), x).reshape(*x.shape, *x.shape[1:])

    return blocks
