"""Numbered sets of inputs: elements that depend on the same inputs share one set.

A tensor's dependence is a tensor of set numbers, one per element, so that moving elements moves numbers. Number 0 is
the empty set, and number 1 + j the set of input j alone. No Python loop here runs over elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import ArgumentError

__all__ = ["MOST", "RowTable", "compressed", "expanded"]

MOST = 2**28  # entries of a table, or of a pattern: 2 GB


def expanded(begin: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of places, the pair (run, place) of each place.

    Raises:
        ArgumentError: more than `MOST` places.
    """
    total = int(length.sum())
    if total > MOST:
        raise ArgumentError(
            f"f: its pattern has more than {MOST} entries, so that nothing is gained by sparsity. Pass pattern="
        )
    run = torch.repeat_interleave(torch.arange(len(length), device=length.device), length, output_size=total)
    first = torch.cumsum(length, 0) - length
    return run, torch.arange(total, device=length.device) + (begin - first)[run]


def compressed(rows: Tensor, count: int) -> Tensor:
    """The ends of the rows of sorted entries: (count + 1)."""
    begin = torch.zeros(count + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=count), 0, out=begin[1:])
    return begin


class RowTable:
    """The table of sets; sets are only added.

    Args:
        inputs: the number of inputs.
    """

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self._begin = torch.arange(-1, inputs, device="cpu").clamp_(min=0)
        self._length = torch.ones(inputs + 1, dtype=torch.int64, device="cpu")
        self._length[0] = 0
        self._column = torch.arange(inputs, device="cpu")
        self._used, self._columns_used = inputs + 1, inputs

    @property
    def count(self) -> int:
        """How many sets there are."""
        return self._used

    def sizes(self, ids: Tensor) -> Tensor:
        """The number of inputs in each set."""
        return self._length[ids]

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(place in ``ids``, input) of every member of these sets."""
        run, place = expanded(self._begin[ids], self._length[ids])
        return run, self._column[place]

    def _append(self, length: Tensor, column: Tensor) -> Tensor:
        """New sets, given their sizes and members; returns their numbers."""
        count, size = len(length), len(column)
        if self._columns_used + size > MOST:
            raise ArgumentError(f"f: its trace needs more than {MOST} entries. Pass pattern=")
        if self._used + count > len(self._length):
            room = max(2 * len(self._length), self._used + count) - len(self._length)
            self._length = torch.cat([self._length, self._length.new_zeros(room)])
            self._begin = torch.cat([self._begin, self._begin.new_zeros(room)])
        if self._columns_used + size > len(self._column):
            room = max(2 * len(self._column), self._columns_used + size) - len(self._column)
            self._column = torch.cat([self._column, self._column.new_zeros(room)])
        ids = torch.arange(self._used, self._used + count, device="cpu")
        self._length[self._used : self._used + count] = length
        self._begin[self._used : self._used + count] = torch.cumsum(length, 0) - length + self._columns_used
        self._column[self._columns_used : self._columns_used + size] = column
        self._used += count
        self._columns_used += size
        return ids

    def unions(self, groups: Tensor, ids: Tensor, count: int) -> Tensor:
        """The union of the sets of each group.

        Args:
            groups: (k), from 0 to ``count`` - 1.
            ids: (k), a set for each.
            count: the number of groups.

        Returns:
            (count), numbers of sets; 0 for a group without members.
        """
        given = ids != 0
        if not bool(given.all()):
            groups, ids = groups[given], ids[given]
        found = torch.zeros(count, dtype=torch.int64, device="cpu")
        if not len(ids):
            return found
        pair = torch.unique(groups * self._used + ids)
        groups, ids = torch.div(pair, self._used, rounding_mode="floor"), pair % self._used
        members = torch.bincount(groups, minlength=count)
        found[groups] = ids  # right for groups with one member
        several = members > 1
        if not bool(several.any()):
            return found
        place = torch.cumsum(several, 0) - 1
        chosen = several[groups]
        run, column = self.columns(ids[chosen])
        key = torch.unique(place[groups[chosen]][run] * self.inputs + column)
        owner = torch.div(key, self.inputs, rounding_mode="floor")
        length = torch.bincount(owner, minlength=int(several.sum()))
        found[several] = self._append(length, key % self.inputs)
        return found

    def joined(self, tensors: list[Tensor]) -> Tensor:
        """The elementwise union of dependences of one shape."""
        result = tensors[0]
        for other in tensors[1:]:
            result = self._joined(result, other)
        return result

    def _joined(self, a: Tensor, b: Tensor) -> Tensor:
        shape, a, b = a.shape, a.reshape(-1), b.reshape(-1)
        both = (a != b) & (a != 0) & (b != 0)
        result = torch.maximum(a, b)  # right if one is empty, or both are equal
        if bool(both.any()):
            low, high = torch.minimum(a[both], b[both]), result[both]
            pair, inverse = torch.unique(low * self._used + high, return_inverse=True)
            low, high = torch.div(pair, self._used, rounding_mode="floor"), pair % self._used
            groups = torch.arange(len(pair), device="cpu")
            result[both] = self.unions(torch.cat([groups, groups]), torch.cat([low, high]), len(pair))[inverse]
        return result.reshape(shape)

    def union_of(self, ids: Tensor) -> int:
        """The number of the union of all of these sets."""
        ids = torch.unique(ids)
        return int(self.unions(torch.zeros_like(ids), ids, 1)[0])
