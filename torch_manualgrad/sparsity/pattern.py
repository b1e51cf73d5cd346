"""The entries of a matrix that may be nonzero, as compressed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import described
from .rows import compressed

__all__ = ["Pattern", "pattern_of"]


@dataclass(frozen=True)
class Pattern:
    """A pattern in compressed rows, each sorted.

    Attributes:
        crow: (m + 1), where each row begins in ``col``.
        col: (nnz), the columns.
        shape: (m, n).
    """

    crow: Tensor
    col: Tensor
    shape: tuple[int, int]

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return self.col.numel()

    def counts(self) -> Tensor:
        """(m), the number of entries of each row."""
        return self.crow.diff()

    def row(self) -> Tensor:
        """(nnz), the row of each entry."""
        return torch.repeat_interleave(torch.arange(self.shape[0], device="cpu"), self.counts(), output_size=self.nnz)

    def rows(self) -> tuple[Tensor, Tensor]:
        """(crow, col)."""
        return self.crow, self.col

    def transposed(self) -> Pattern:
        """The pattern of the transpose."""
        order = torch.argsort(self.col, stable=True)
        return Pattern(compressed(self.col, self.shape[1]), self.row()[order], (self.shape[1], self.shape[0]))

    def transposed_rows(self) -> tuple[Tensor, Tensor]:
        """(crow, col) of the transpose."""
        return self.transposed().rows()

    def is_symmetric(self) -> bool:
        """Whether it equals its transpose."""
        other = self.transposed()
        return self.shape == other.shape and torch.equal(self.crow, other.crow) and torch.equal(self.col, other.col)

    def chosen(self, entries: Tensor) -> Pattern:
        """The pattern with these entries only, by a mask (nnz)."""
        return Pattern(compressed(self.row()[entries], self.shape[0]), self.col[entries], self.shape)

    def without_diagonal(self) -> Pattern:
        """The entries off the diagonal."""
        return self.chosen(self.row() != self.col)

    def upper_edges(self) -> Pattern:
        """The incidence matrix of the graph of a symmetric pattern: a row for each entry above the diagonal."""
        row = self.row()
        above = row < self.col
        ends = torch.stack([row[above], self.col[above]], 1)
        crow = torch.arange(0, 2 * len(ends) + 1, 2, device="cpu")
        return Pattern(crow, ends.reshape(-1), (len(ends), self.shape[0]))

    def mirror(self) -> Tensor:
        """(nnz), for each entry (i, j) of a symmetric pattern the place of (j, i)."""
        place = torch.empty(self.nnz, dtype=torch.int64, device="cpu")
        place[torch.argsort(self.col, stable=True)] = torch.arange(self.nnz, device="cpu")
        return place

    def sparse(self) -> Tensor:
        """A sparse COO tensor (m, n) of bool."""
        ones = torch.ones(self.nnz, dtype=torch.bool, device="cpu")
        places = torch.stack([self.row(), self.col])
        return torch.sparse_coo_tensor(
            places, ones, self.shape, device="cpu", is_coalesced=True, check_invariants=False
        )

    def dense(self) -> Tensor:
        """A dense tensor (m, n) of bool."""
        found = torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        found[self.row(), self.col] = True
        return found


def pattern_of(given: Any, argument: str, shape: tuple[int, int] | None = None) -> Pattern:
    """The pattern of a matrix.

    Args:
        given: a tensor, dense or sparse, a `Pattern`, or a sparse matrix of scipy.
        argument: its name in errors.
        shape: the required (m, n); a dense tensor may have more dims with the same number of elements.

    Raises:
        TypeError: it is none of these, or has another shape.
    """
    if isinstance(given, Pattern):
        found = given
    else:
        if hasattr(given, "tocoo") and hasattr(given, "shape"):
            coo = given.tocoo()
            row, column = (torch.as_tensor(x.astype("int64"), device="cpu") for x in (coo.row, coo.col))
            size = tuple(coo.shape)
        elif isinstance(given, Tensor):
            x = given.detach().cpu()
            if x.layout is torch.strided and shape is not None and x.numel() == shape[0] * shape[1]:
                x = x.reshape(shape)
            if x.dim() != 2:
                raise TypeError(f"{argument}: expected a matrix, got {described(given)}")
            size = tuple(x.shape)
            if x.layout is torch.strided:
                row, column = x.nonzero().unbind(1)
            else:  # stored entries count, whatever their values
                row, column = x.to_sparse_coo().coalesce().indices()
        else:
            raise TypeError(f"{argument}: expected a tensor or a sparse matrix of scipy, got {described(given)}")
        key = torch.unique(row * max(size[1], 1) + column)
        row = torch.div(key, max(size[1], 1), rounding_mode="floor")
        found = Pattern(compressed(row, size[0]), key % max(size[1], 1), (size[0], size[1]))
    if shape is not None and found.shape != shape:
        raise TypeError(f"{argument}: expected a matrix of shape {list(shape)}, got shape {list(found.shape)}")
    return found
