"""Plans, prepared once and evaluated often: a pattern, its colors, and the place of each nonzero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.internals import in_functorch, value_of
from .constants import Constants
from .layouts import Layout, Layouts
from .pattern import Pattern
from .trace import PatternError

__all__ = ["Plan", "called", "check_coloring", "check_input", "compare", "outside_of_transforms"]

F = TypeVar("F", bound=Callable[..., Any])


def called(name: str) -> Callable[[F], F]:
    """Give a method its name in errors."""

    def rename(function: F) -> F:
        function.__name__ = name
        return function

    return rename


def check_input(x: Any) -> Tensor:
    """``x``, copied if it is expanded: torch.func.jvp takes no such tensor. Raises unless it is dense and has derivatives."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {described(x)}")
    if x.layout is not torch.strided or x.is_nested or not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"x: expected a dense floating point or complex tensor, got {described(x)} and {x.layout}")
    expanded = any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride()))
    return x.contiguous() if expanded else x


def outside_of_transforms(x: Tensor, name: str) -> None:
    """Raise inside of a transform of torch.func, which does not support sparse tensors."""
    if in_functorch() and value_of(x) is not x:
        raise RuntimeError(
            f"{name}: sparse tensors cannot pass transforms of torch.func. Call {name}.prepare(f, x) outside of the "
            "transform, and values(x) of the plan inside"
        )


class Plan:
    """The common part of plans.

    Attributes:
        shape: of the COO tensor.
        mode: how products are computed.
        colors: the number of colors, and of products.
        coloring: the color of each column, or of each row.
        conservative: the operators assumed to mix all of their inputs, and how often each was called.
        chunk_size: how many products are computed at once.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        x: Tensor,
        pattern: Pattern,
        shape: tuple[int, ...],
        conservative: dict[str, int],
        constants: Constants | None,
    ) -> None:
        self._f, self._pattern, self.shape, self.conservative = f, pattern, shape, conservative
        self._constants = constants
        self._like = (x.shape, x.dtype, x.device)
        self._layouts = Layouts(pattern, shape, x.device)
        self.mode, self.colors, self.chunk_size = "", 0, 1
        self.coloring: Tensor = pattern.col

    @property
    def pattern(self) -> Tensor:
        """The pattern (m, n), a sparse COO tensor of bool; rows and columns are flattened outputs and inputs."""
        return self._pattern.sparse()

    @property
    def nnz(self) -> int:
        """The number of entries of the pattern."""
        return self._pattern.nnz

    @property
    def rows(self) -> Tensor:
        """(nnz), the row of each value."""
        return self._pattern.row()

    @property
    def columns(self) -> Tensor:
        """(nnz), the column of each value."""
        return self._pattern.col

    def __repr__(self) -> str:
        m, n = self._pattern.shape
        found = f"{type(self).__name__}({m} x {n}, {self.nnz} nonzeros, {self.colors} colors, mode {self.mode!r}"
        if self.conservative:
            found += f", conservative: {', '.join(sorted(self.conservative))}"
        return f"{found})"

    def _checked(self, x: Tensor, args: Sequence[Any]) -> Tensor:
        """`check_input`, for a point that the plan was prepared for."""
        x = check_input(x)
        if self._constants is not None:
            self._constants.check(args)
        shape, dtype, device = self._like
        if (x.shape, x.dtype, x.device) != (shape, dtype, device):
            raise ArgumentError(
                f"x: the plan was prepared for shape {list(shape)}, {dtype} on {device}, got {described(x)} on {x.device}"
            )
        return x

    def values(self, x: Tensor, *args: Any) -> Any:
        """(nnz), the nonzeros, in the order of ``rows`` and ``columns``."""
        raise NotImplementedError

    def matrix(self, x: Tensor, *args: Any, layout: Layout = "coo", blocksize: tuple[int, int] | None = None) -> Any:
        """The derivative as a sparse matrix.

        Args:
            x: the shape, dtype and device that the plan was prepared for.
            args: further arguments of ``f``.
            layout: "coo": a tensor of shape ``shape``. "csr", "bsr": (m, n), flattened. "scipy": a ``csr_array``.
            blocksize: of "bsr".

        Returns:
            The matrix, or for a plan of two, a tuple of them. Derivatives go through its values.

        Raises:
            TypeError: an argument is not of its type.
            ValueError: another shape, dtype or device, or an invalid ``blocksize``.
        """
        if layout not in ("coo", "csr", "bsr", "scipy"):
            raise ArgumentError(f"layout: expected 'coo', 'csr', 'bsr' or 'scipy', got {layout!r}")
        values = self.values(x, *args)
        if isinstance(values, tuple):
            return tuple(self._layouts.matrix(v, layout, blocksize) for v in values)
        return self._layouts.matrix(values, layout, blocksize)


def check_coloring(valid: bool) -> None:
    """Raise if the colors of the columns do not separate the entries of a matrix.

    Raises:
        PatternError: the coloring is not valid.
    """
    if not valid:
        raise PatternError("the coloring is not valid for the pattern; this is an error in torch_manualgrad")


def compare(found: Tensor, expected: Tensor, scale: Tensor, what: str) -> None:
    """Raise if products with the sparse derivative differ from those with the derivative.

    Entries that are zero but for rounding may differ by a part of the largest product.

    Args:
        found: the products with the sparse derivative.
        expected: those with the derivative.
        scale: the sums of the moduli of what ``found`` sums.
        what: of the matrix, in errors.

    Raises:
        PatternError: the message names up to five places.
    """
    eps = torch.finfo(found.dtype).eps
    sizes = scale + expected.abs()
    rounding = eps * sizes.nan_to_num(0, 0, 0).amax() if sizes.numel() else 0
    wrong = ((found - expected).abs() > eps**0.5 * sizes + 64 * rounding) & expected.isfinite()
    if bool(wrong.any()):
        places = wrong.nonzero().reshape(-1)
        named = ", ".join(str(int(p)) for p in places[:5]) + (", ..." if len(places) > 5 else "")
        raise PatternError(
            f"f: the pattern misses nonzeros: products with the derivative in a random direction differ in {len(places)} "
            f"of {len(wrong)} {what}: {named}"
        )
