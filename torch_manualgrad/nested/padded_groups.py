"""Sequences of similar lengths in padded groups, for products of every position with every other.

Lengths are read once per call. In a graph they cannot be read, so all sequences form one group, and a mask separates them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .packing import segments

__all__ = ["Group", "Groups"]

# A sequence with at least this many pairs of positions is a group of its own: padding would cost more than another call.
_LARGE = 96 * 96


class _Side:
    """The positions of the queries, or of the keys, of one group in the packed buffer."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.count, self.longest = len(lengths), max(lengths)
        self.padded = min(lengths) < self.longest
        self.start = starts[0] if self.count == 1 else None
        self.absent: Tensor | None = None
        if self.start is None:
            local = torch.arange(self.longest, device=device)
            positions = torch.tensor(starts, device=device)[:, None] + local
            if self.padded:
                self.absent = local >= torch.tensor(lengths, device=device)[:, None]
                positions = positions.masked_fill(self.absent, starts[0])
            self.positions = positions.flatten()

    def cut(self, x: Tensor) -> Tensor:
        """(P, T, d) -> (n, P, L, d), zeros after the end of a shorter sequence."""
        if self.start is not None:
            return x.narrow(1, self.start, self.longest).unsqueeze(0)
        group = x.index_select(1, self.positions).reshape(x.shape[0], self.count, self.longest, x.shape[2])
        return (group if self.absent is None else group.masked_fill(self.absent[:, :, None], 0)).transpose(0, 1)


class _Whole:
    """All positions as one sequence."""

    def cut(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


class Group:
    """Sequences that are computed together.

    Attributes:
        queries: the positions of the queries in the packed buffers.
        keys: the positions of the keys in the packed buffers.
        masked: True for the keys that a query does not attend to, broadcasting to (n, P, Lq, Lk); None if every query
            attends to all keys or, if ``causal``, to all keys up to its own position.
        causal: whether the caller has to apply the causal mask, which ``masked`` then omits.
        may_be_fully_masked: whether a query may attend to no key at all.
    """

    def __init__(
        self,
        queries: _Side | _Whole,
        keys: _Side | _Whole,
        masked: Tensor | None,
        causal: bool,
        may_be_fully_masked: bool = False,
    ) -> None:
        self.queries, self.keys, self.masked, self.causal, self.may_be_fully_masked = (
            queries,
            keys,
            masked,
            causal,
            may_be_fully_masked,
        )


class Groups:
    """The groups of one call, and the conversion of padded results to packed ones."""

    def __init__(self, q_offsets: Tensor, k_offsets: Tensor, q_count: int, k_count: int, causal: bool) -> None:
        self.groups: list[Group] = []
        self._back: list[Tensor | None] = [None, None]
        if _readable(q_offsets) and _readable(k_offsets):
            self._read(q_offsets, k_offsets, causal)
        else:
            ids = segments(q_offsets, q_count), segments(k_offsets, k_count)
            masked = ids[0][:, None] != ids[1]
            if causal:
                local = [
                    torch.arange(n, device=i.device) - o[i]
                    for n, i, o in zip((q_count, k_count), ids, (q_offsets, k_offsets))
                ]
                masked = masked | (local[0][:, None] < local[1])
            self.groups.append(Group(_Whole(), _Whole(), masked, False, may_be_fully_masked=True))

    def _read(self, q_offsets: Tensor, k_offsets: Tensor, causal: bool) -> None:
        device = q_offsets.device
        at = q_offsets.tolist(), k_offsets.tolist()
        lengths = [[b - a for a, b in zip(o, o[1:])] for o in at]
        members: dict[tuple[int, ...], list[int]] = {}
        for i, pair in enumerate(zip(*lengths)):
            if 0 not in pair:
                large = pair[0] * pair[1] >= _LARGE
                members.setdefault((-1, i) if large else (_rounded(pair[0]), _rounded(pair[1])), []).append(i)
        if not members:  # an empty group, so that results have their widths
            self.groups.append(Group(_Side([0], [0], device), _Side([0], [0], device), None, causal))
        ends, slots = [0, 0], [[-1] * len(lengths[0]) for _ in range(2)]
        for group in members.values():
            sides = [_Side([at[s][i] for i in group], [lengths[s][i] for i in group], device) for s in range(2)]
            # a causal query attends to no padding if its sequence has at least as many keys as queries
            covered = causal and all(lengths[0][i] <= lengths[1][i] for i in group)
            masked = None
            if sides[1].absent is not None and not covered:
                masked = sides[1].absent[:, None, None, :]
                if causal:
                    local = [torch.arange(s.longest, device=device) for s in sides]
                    masked = masked | (local[0][:, None] < local[1])
            self.groups.append(Group(sides[0], sides[1], masked, causal and masked is None))
            for s in range(2):
                for i in group:
                    slots[s][i], ends[s] = ends[s], ends[s] + sides[s].longest
        for s, offsets in enumerate((q_offsets, k_offsets)):
            if slots[s] != at[s][:-1] or ends[s] != at[s][-1]:
                self._back[s] = _back(offsets, slots[s], at[s][-1], ends[s])

    def joined(self, parts: Sequence[Tensor], side: int) -> Tensor:
        """Results (n, P, L, d) of all groups -> (P, T, d), zeros for a sequence in no group. side: 0 query, 1 key."""
        flat = [part.transpose(0, 1).flatten(1, 2) for part in parts]
        back = self._back[side]
        if back is None:
            return torch.cat(flat, 1) if len(flat) > 1 else flat[0]
        zeros = flat[0].new_zeros(flat[0].shape[0], 1, flat[0].shape[2])
        return torch.cat([*flat, zeros], 1).index_select(1, back)


def _readable(offsets: Tensor) -> bool:
    return type(offsets) is Tensor and not torch.compiler.is_compiling()


def _rounded(length: int) -> int:
    """Round up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def _back(offsets: Tensor, slots: list[int], count: int, missing: int) -> Tensor:
    """The index of each packed position among the groups' padded ones, (T,); ``missing`` for those in no group."""
    ids = segments(offsets, count)
    base = torch.tensor(slots, device=offsets.device)[ids]
    local = torch.arange(count, device=offsets.device) - offsets[ids]
    return torch.where(base < 0, missing, base + local)
