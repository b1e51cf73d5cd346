"""Sparse Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked
from ..core.override.override import under_active_rules
from .coloring import Ordering, colored
from .compression import Compression, backward_product, chunk_for, forward_product
from .constants import Constants
from .detection import check_output, detached, detect
from .layouts import Layout
from .pattern import Pattern, pattern_of
from .plan import Plan, called, check_coloring, check_input, compare, outside_of_transforms
from .trace import PatternError

__all__ = ["JacobianPlan", "SparseJacobian", "sparse_jacobian"]

Mode = Literal["auto", "fwd", "rev"]


class JacobianPlan(Plan):
    """A Jacobian that is prepared once and evaluated often, made by `mg.sparse_jacobian.prepare`.

    Attributes:
        shape: of the COO tensor: the shape of the result of ``f``, then that of ``x``.
        mode: "fwd", products by jvps, or "rev", by vjps.
        colors: the number of colors, and of products.
        coloring: the color of each column (n), or in mode "rev" of each row (m).
        conservative: the operators assumed to mix all of their inputs, and how often each was called.
        chunk_size: how many products are computed at once.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        x: Tensor,
        y: Tensor,
        pattern: Pattern,
        conservative: dict[str, int],
        constants: Constants | None,
        mode: str,
        coloring: Tensor,
        chunk: Callable[[int], int],
        wirtinger: bool,
    ) -> None:
        super().__init__(f, x, pattern, (*y.shape, *x.shape), conservative, constants)
        self.mode, self._wirtinger = mode, wirtinger
        self.colors = int(coloring.max()) + 1 if coloring.numel() and pattern.nnz else 0
        self.coloring = coloring
        self.chunk_size = chunk(self.colors)
        here, across = (pattern.col, pattern.row()) if mode == "fwd" else (pattern.row(), pattern.col)
        keys = across * max(self.colors, 1) + coloring[here]
        check_coloring(len(torch.unique(keys)) == len(keys))
        self._compression = Compression(coloring, self.colors, self.chunk_size, coloring[here], across, x.device)

    def values(self, x: Tensor, *args: Any) -> Any:
        """The nonzeros of the Jacobian at a point, differentiable in all modes and under vmap.

        Args:
            x: the shape, dtype and device that the plan was prepared for.
            args: further arguments of ``f``; values are differentiable in these too.

        Returns:
            (nnz), in the order of ``rows`` and ``columns``. With ``wirtinger=True`` a pair of these, $df/dz$ and
            $df/d conj(z)$.

        Raises:
            TypeError: ``x`` is not a dense tensor.
            ValueError: another shape, dtype or device, or another integer among the arguments.
        """
        x = self._checked(x, args)

        @under_active_rules
        def function(x: Tensor) -> Tensor:
            return self._f(x, *args)

        if not self.colors:
            nothing = function(x).reshape(-1)[:0]
            nothing = nothing.to(torch.promote_types(nothing.dtype, x.dtype))
            return (nothing, nothing) if self._wirtinger else nothing
        if self._wirtinger:
            along, across = (self._compression(forward_product(function, x, k), x) for k in (1, 1j))
            return (along - 1j * across) / 2, (along + 1j * across) / 2
        if self.mode == "fwd":
            return self._compression(forward_product(function, x), x)
        product, y = backward_product(function, x)
        return self._compression(product, y)


def _check_products(plan: JacobianPlan, x: Tensor, args: Any, count: int = 2) -> None:
    """Compare products with the sparse matrix and with the Jacobian, in random directions."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    row, col = plan.rows.to(x.device), plan.columns.to(x.device)
    m, n = plan.pattern.shape
    values = plan.values(x, *args)

    @under_active_rules
    def function(x: Tensor) -> Tensor:
        return plan._f(x, *args)

    for _ in range(count):
        if plan.mode == "fwd":
            v = torch.randn(x.shape, dtype=x.dtype, generator=generator, device="cpu").to(x.device)
            expected: Tensor = torch.func.jvp(function, (x,), (v,))[1].reshape(-1)
            pairs = [(values, v)] if not isinstance(values, tuple) else [(values[0], v), (values[1], v.conj())]
            terms = [a * b.reshape(-1)[col] for a, b in pairs]
            found, scale = expected.new_zeros(m), expected.new_zeros(m).abs()
            for term in terms:
                found = found.index_add(0, row, term.to(found.dtype))
                scale = scale.index_add(0, row, term.abs().to(scale.dtype))
            compare(found, expected, scale, "rows")
        else:
            pair: Any = torch.func.vjp(function, x)
            y, pull = pair
            w = torch.randn(y.shape, dtype=y.dtype, generator=generator, device="cpu").to(x.device)
            expected = pull(w.conj())[0].conj().reshape(-1)
            terms = [values * w.reshape(-1)[row]]
            zero = expected.new_zeros(n)
            compare(zero.index_add(0, col, terms[0]), expected, zero.abs().index_add(0, col, terms[0].abs()), "columns")


class SparseJacobian:
    """`mg.sparse_jacobian`: Jacobians with few nonzeros, from a few products.

    Call it with a function, or prepare a plan: ``mg.sparse_jacobian(f)(x)``, ``mg.sparse_jacobian.prepare(f, x)``.
    """

    @checked
    @called("sparse_jacobian")
    def __call__(
        self,
        f: Callable[..., Any],
        *,
        mode: Mode = "auto",
        pattern: object = None,
        ordering: Ordering = "auto",
        check: bool | None = None,
        layout: Layout = "coo",
        blocksize: tuple[int, int] | None = None,
        chunk_size: int | None = None,
        holomorphic: bool = False,
        wirtinger: bool = False,
    ) -> Callable[..., Any]:
        """A function that returns the Jacobian of another as a sparse matrix.

        Each call finds the pattern and colors again. `prepare` does this once.

        Args:
            f: ``f(x, *args)``, a tensor, of a tensor and constants.
            mode: "fwd" computes products by jvps, "rev" by vjps; "auto" takes the one with fewer colors.
            pattern: (m, n), the entries that may be nonzero: a tensor, dense or sparse, or a sparse matrix of scipy.
                None: found from a run of ``f``.
            ordering: of the coloring, as in `mg.sparsity.color`.
            check: whether to compare products in random directions with those of the dense Jacobian, and to raise if they
                differ. None: if ``pattern`` is given.
            layout: "coo": a tensor with the shape of the result of ``f``, then of ``x``, as from ``torch.func.jacfwd``.
                "csr", "bsr": (m, n), with both flattened. "scipy": a ``csr_array``.
            blocksize: of "bsr".
            chunk_size: how many products are computed at once; None: about 256 MB.
            holomorphic: for a complex ``x``, the derivative of a holomorphic function. The result is checked for that in
                one direction.
            wirtinger: for a complex ``x``, the pair $df/dz$, $df/d conj(z)$.

        Returns:
            ``jacobian(x, *args)``, the sparse matrix; with ``wirtinger`` a pair. In reverse mode derivatives go through
            its values, ``coalesce().values()``.

        Raises:
            TypeError: an argument is not of its type.
            ValueError: a name is unknown, or ``x`` is complex without ``holomorphic`` or ``wirtinger``.
            PatternError: no pattern can be found, or the check fails.
        """

        def jacobian(x: Tensor, *args: Any) -> Any:
            outside_of_transforms(check_input(x), "sparse_jacobian")
            plan = self.prepare(
                f,
                x,
                *args,
                mode=mode,
                pattern=pattern,
                ordering=ordering,
                check=check,
                chunk_size=chunk_size,
                holomorphic=holomorphic,
                wirtinger=wirtinger,
            )
            return plan.matrix(x, *args, layout=layout, blocksize=blocksize)

        return jacobian

    @checked
    @called("sparse_jacobian.prepare")
    def prepare(
        self,
        f: Callable[..., Any],
        x: Tensor,
        *args: Any,
        mode: Mode = "auto",
        pattern: object = None,
        ordering: Ordering = "auto",
        check: bool | None = None,
        chunk_size: int | None = None,
        holomorphic: bool = False,
        wirtinger: bool = False,
    ) -> JacobianPlan:
        """A plan for points with the shape, dtype and device of ``x``.

        Args:
            f: as in `mg.sparse_jacobian`.
            x: an example; its values do not matter.
            args: further arguments of ``f``. The pattern may depend on those that are integers, such as indices.
            mode: as in `mg.sparse_jacobian`.
            pattern: as in `mg.sparse_jacobian`.
            ordering: as in `mg.sparse_jacobian`.
            check: as in `mg.sparse_jacobian`, at ``x``.
            chunk_size: as in `mg.sparse_jacobian`.
            holomorphic: as in `mg.sparse_jacobian`.
            wirtinger: as in `mg.sparse_jacobian`.

        Returns:
            The plan.

        Raises:
            TypeError: an argument is not of its type.
            ValueError: as in `mg.sparse_jacobian`.
            PatternError: no pattern can be found, or the check fails.
        """
        x = check_input(x)
        outside_of_transforms(x, "sparse_jacobian")
        if chunk_size is not None and chunk_size < 1:
            raise ArgumentError(f"chunk_size: expected a positive number, got {chunk_size}")
        if holomorphic and wirtinger:
            raise ArgumentError("holomorphic, wirtinger: expected one of them at most, got both")
        if x.is_complex() != (holomorphic or wirtinger):
            raise ArgumentError(
                "holomorphic, wirtinger: expected one of them to be True for a complex x, and none for a real one, got "
                f"holomorphic={holomorphic}, wirtinger={wirtinger} and {x.dtype}"
            )
        x, args = x.detach(), tuple(detached(args))
        # a given pattern may hold for other arguments too
        constants = Constants(args) if pattern is None else None
        if pattern is None:
            found = detect(f, x, args)
            y, structure, conservative, size = found.output, found.pattern, found.conservative, found.bytes
        else:
            with torch.no_grad():
                y = f(x, *args)
            check_output(y)
            structure, conservative = pattern_of(pattern, "pattern", (y.numel(), x.numel())), {}
            size = 8 * (y.numel() * y.element_size() + x.numel() * x.element_size())
        if holomorphic and not y.is_complex():
            raise ArgumentError(f"holomorphic: expected a complex result of f, got {y.dtype}")
        # for a real x, products with J^H lose the imaginary part of J
        forward_only = wirtinger or (y.is_complex() and not x.is_complex())
        if forward_only and mode == "rev":
            raise ArgumentError(f"mode: expected 'fwd' or 'auto' for a {x.dtype} x and a {y.dtype} result, got 'rev'")
        used, coloring = _colors(structure, mode, forward_only, ordering, lambda: _has_forward(f, x, args))
        plan = JacobianPlan(
            f,
            x,
            y,
            structure,
            conservative,
            constants,
            used,
            coloring,
            lambda n: chunk_for(n, size, chunk_size),
            wirtinger,
        )
        if holomorphic:
            _check_holomorphic(f, x, args, used)
        if check if check is not None else pattern is not None:
            _check_products(plan, x, args)
        return plan


def _has_forward(f: Callable[..., Any], x: Tensor, args: Any) -> bool:
    """Whether the function has a jvp."""
    try:
        torch.func.jvp(under_active_rules(lambda x: f(x, *args)), (x,), (torch.zeros_like(x),))
    except NotImplementedError:
        return False
    return True


def _colors(
    pattern: Pattern, mode: str, forward_only: bool, ordering: Ordering, has_forward: Callable[[], bool]
) -> tuple[str, Tensor]:
    if mode == "auto" and not forward_only and not has_forward():
        mode = "rev"
    if mode == "fwd" or (mode == "auto" and forward_only):
        return "fwd", colored(pattern, "columns", ordering)
    by_rows = colored(pattern, "rows", ordering)
    if mode == "rev":
        return "rev", by_rows
    by_columns = colored(pattern, "columns", ordering)
    fewer = by_rows.numel() and by_columns.numel() and int(by_rows.max()) < int(by_columns.max())
    return ("rev", by_rows) if fewer else ("fwd", by_columns)


def _check_holomorphic(f: Callable[..., Any], x: Tensor, args: Any, mode: str) -> None:
    """Raise if the derivative at x is not linear over the complex numbers, in a random direction."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    @under_active_rules
    def function(x: Tensor) -> Tensor:
        return f(x, *args)

    if mode == "fwd":
        product: Callable[[Tensor], Tensor] = lambda v: torch.func.jvp(function, (x,), (v,))[1]  # noqa: E731
        like = x
    else:
        pair: Any = torch.func.vjp(function, x)
        like, pull = pair
        product = lambda v: pull(v)[0]  # noqa: E731
    v = torch.randn(like.shape, dtype=like.dtype, generator=generator, device="cpu").to(x.device)
    once, turned = product(v), product(1j * v)
    scale = once.abs().amax() if once.numel() else 0
    if once.numel() and bool(((turned - 1j * once).abs() > 1e3 * torch.finfo(x.dtype).eps ** 0.75 * scale).any()):
        raise PatternError(
            "f: not holomorphic at x: its derivative is not linear over the complex numbers; wirtinger=True"
        )


sparse_jacobian = SparseJacobian()
