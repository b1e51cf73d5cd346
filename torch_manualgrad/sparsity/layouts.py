"""Matrices in sparse layouts, from their nonzeros in the order of a pattern."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError
from .pattern import Pattern
from .rows import compressed

__all__ = ["Layout", "Layouts"]

Layout = Literal["coo", "csr", "bsr", "scipy"]


class Layouts:
    """Makes matrices of one pattern.

    Args:
        pattern: (m, n).
        shape: of the COO tensor: that of the result, then that of the input.
        device: of the matrices.
    """

    def __init__(self, pattern: Pattern, shape: tuple[int, ...], device: torch.device) -> None:
        self.pattern, self.shape, self.device = pattern, shape, device

    @functools.cached_property
    def _indices(self) -> Tensor:
        place = self.pattern.row() * self.pattern.shape[1] + self.pattern.col
        if not self.shape:
            return torch.zeros(0, len(place), dtype=torch.int64, device=self.device)
        return torch.stack(torch.unravel_index(place, self.shape)).to(self.device)

    @functools.cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        return self.pattern.crow.to(self.device), self.pattern.col.to(self.device)

    def matrix(self, values: Tensor, layout: Layout, blocksize: tuple[int, int] | None) -> Any:
        """The matrix with these nonzeros (nnz); derivatives go through its values.

        Raises:
            ValueError: ``blocksize`` is missing, or does not divide the shape.
        """
        if layout == "coo":
            return torch.sparse_coo_tensor(
                self._indices, values, self.shape, device=self.device, is_coalesced=True, check_invariants=False
            )
        if layout == "csr":
            return torch.sparse_csr_tensor(
                *self._rows, values, self.pattern.shape, device=self.device, check_invariants=False
            )
        if layout == "bsr":
            crow, col, places, count = self._blocks(blocksize)
            assert blocksize is not None
            blocks = values.new_zeros(count * blocksize[0] * blocksize[1]).index_put((places,), values)
            return torch.sparse_bsr_tensor(
                crow,
                col,
                blocks.reshape(count, *blocksize),
                self.pattern.shape,
                device=self.device,
                check_invariants=False,
            )
        from scipy.sparse import csr_array  # type: ignore[import-untyped]  # an optional dependency

        numbers = values.detach().resolve_conj().cpu().numpy()
        ends, columns = (x.numpy() for x in self.pattern.rows())
        return csr_array((numbers, columns, ends), shape=self.pattern.shape)

    @functools.cache  # noqa: B019  one plan has one or two block sizes
    def _blocks(self, size: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor, int]:
        """(crow, col) of the blocks, the place of each nonzero among their elements, and the number of blocks."""
        m, n = self.pattern.shape
        if size is None or min(size) < 1 or m % size[0] or n % size[1]:
            raise ArgumentError(f"blocksize: expected two numbers that divide the shape {[m, n]}, got {size}")
        row, col = self.pattern.row(), self.pattern.col
        wide = n // size[1]
        block = torch.div(row, size[0], rounding_mode="floor") * wide + torch.div(col, size[1], rounding_mode="floor")
        found, inverse = torch.unique(block, return_inverse=True)
        places = (inverse * size[0] + row % size[0]) * size[1] + col % size[1]
        crow = compressed(torch.div(found, max(wide, 1), rounding_mode="floor"), m // size[0])
        move = [x.to(self.device) for x in (crow, found % max(wide, 1), places)]
        return move[0], move[1], move[2], len(found)
