"""Computes the entries of a symmetric matrix from the sums of its columns of each color."""

from __future__ import annotations

import torch
from torch import Tensor

from . import greedy
from .pattern import Pattern
from .plan import check_coloring

__all__ = ["Substitution"]


class Substitution:
    """Reads the entries from the compressed matrix $B$, $B_(c i) = sum_j A_(i j)$ over the columns of color $c$.

    Args:
        pattern: (n, n), symmetric.
        coloring: (n).
        kind: "columns": each entry is $B_(c_j i)$. "star": that or its mirror image. "acyclic": entries are computed
            sequentially, each minus the known ones.
        device: of $B$.

    Attributes:
        color: (nnz), the row of $B$ that each entry is read from.
        place: (nnz), the column.
        steps: the number of sequential steps.
    """

    def __init__(self, pattern: Pattern, coloring: Tensor, kind: str, device: torch.device) -> None:
        n = pattern.shape[0]
        row, col = pattern.row(), pattern.col
        # an entry that is the only one of its row and color
        key, inverse, count = torch.unique(row * max(n, 1) + coloring[col], return_inverse=True, return_counts=True)
        self.steps, self._sums = 1, []
        entries = torch.arange(pattern.nnz, device="cpu")
        mirror, alone = pattern.mirror(), count[inverse] == 1
        if kind != "acyclic":
            check_coloring(bool((alone | alone[mirror]).all()))
            source = torch.where(alone, entries, mirror)
            self.color, self.place = coloring[col[source]], row[source]
            return
        step = greedy.elimination(pattern.crow, pattern.col, coloring)
        check_coloring(bool((step > -2).all()) and bool(alone[step == -1].all()))
        # for each entry, the one of its pair that is computed from its own row; on the diagonal, the entry itself
        source = torch.where((step < 0) | (step % 2 == 1), entries, mirror)
        when = torch.where(step < 0, 0, torch.div(step, 2, rounding_mode="floor"))
        self.color, self.place = coloring[col[source]], row[source]
        self.steps = int(when.max()) + 1 if len(when) else 1
        order = torch.argsort(inverse, stable=True)  # entries by row and color
        start = torch.cumsum(count, 0) - count
        (own,) = torch.where((when > 0) & (step % 2 == 1))
        own = own[torch.argsort(when[own], stable=True)]
        for targets in own.split(torch.bincount(when[own], minlength=self.steps)[1:].tolist()):
            group = inverse[targets]
            run = torch.repeat_interleave(torch.arange(len(targets), device="cpu"), count[group])
            offset = torch.cumsum(count[group], 0) - count[group]
            members = order[torch.arange(len(run), device="cpu") - offset[run] + start[group][run]]
            others = members != targets[run]
            both = torch.cat([targets, mirror[targets]])
            self._sums.append(tuple(x.to(device) for x in (targets, run[others], members[others], both)))

    def __call__(self, values: Tensor) -> Tensor:
        """The entries (nnz), given those of $B$ at ``color`` and ``place``."""
        for targets, run, members, both in self._sums:
            known = values.new_zeros(len(targets)).index_add(0, run, values[members])
            found = values[targets] - known
            values = values.index_copy(0, both, torch.cat([found, found]))
        return values
