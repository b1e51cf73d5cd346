"""Splits attention into pieces of queries, and finds the blocks of keys that each piece needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.internals import is_batched, values_readable

__all__ = ["BlockTable", "Piece"]

_QUERIES = 128  # of a piece, about: the scores of one piece are in memory


class Piece(NamedTuple):
    """Queries from ``first`` up to ``last``, and the blocks of keys that one of them may attend to."""

    first: int
    last: int
    blocks: tuple[int, ...]


def _listed(count: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Of lists of blocks of keys, one for each block of queries, a table: (b, h, blocks of queries, ``blocks``)."""
    count, indices = count[(None,) * (3 - count.dim())], indices[(None,) * (4 - indices.dim())]
    among = torch.arange(indices.shape[-1], device=count.device) < count[..., None]
    table = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=count.device)
    return table.scatter(-1, torch.where(among, indices, blocks).long(), True)[..., :-1]


class BlockTable:
    """The blocks of a ``BlockMask``.

    Args:
        mask: the ``BlockMask``, or None for one block with all keys.
        queries, keys: their numbers.
        device: of the mask.

    Attributes:
        size: the number of keys in a block.
        listed, full: whether a block has a key that is admitted, and only such keys: (b, h, blocks of queries, blocks of keys).
    """

    def __init__(self, mask: Any, queries: int, keys: int, device: torch.device) -> None:
        self._queries, self._rows, self.size = queries, max(queries, 1), max(keys, 1)
        self.listed = self.full = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        if mask is not None:
            self._rows, self.size = (min(block, n) for block, n in zip(mask.BLOCK_SIZE, (self._rows, self.size)))
            blocks = -(-keys // self.size)
            self.listed = _listed(mask.kv_num_blocks, mask.kv_indices, blocks)
            self.full = torch.zeros_like(self.listed)
            if mask.full_kv_num_blocks is not None:
                self.full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, blocks)
                self.listed = self.listed | self.full

    def pieces(self) -> Iterator[Piece]:
        """The pieces, in the order of their queries. Blocks are left out if their values can be read.

        A graph has all queries in one piece: its compiler chooses what to compute again.
        """
        if torch.compiler.is_dynamo_compiling():
            yield Piece(0, self._queries, tuple(range(self.listed.shape[-1])))
            return
        step = self._rows * max(_QUERIES // self._rows, 1) if self._rows <= 2 * _QUERIES else _QUERIES
        some = values_readable([self.listed]) and not is_batched(self.listed)
        wanted = self.listed.flatten(0, 1).any(0).tolist() if some else None
        everything = tuple(range(self.listed.shape[-1]))
        for first in range(0, max(self._queries, 1), step):
            last = min(first + step, self._queries)
            blocks = everything
            if wanted is not None:
                rows = wanted[first // self._rows : (max(last, first + 1) - 1) // self._rows + 1]
                # one at least, so that all tensors have a gradient
                blocks = tuple(k for k in everything if any(row[k] for row in rows)) or everything[:1]
            yield Piece(first, last, blocks)

    def spread(self, table: Tensor, piece: Piece, keys: int) -> Tensor:
        """The entries of ``listed`` or ``full`` for each query and key of a piece: (b, h, i, j)."""
        start = piece.first // self._rows
        part = table[:, :, start : (piece.last - 1) // self._rows + 1].repeat_interleave(self._rows, 2)
        part = part[:, :, piece.first - start * self._rows : piece.last - start * self._rows]
        if len(piece.blocks) < part.shape[-1]:
            part = part[..., list(piece.blocks)]
        return part.repeat_interleave(self.size, 3)[..., :keys]
