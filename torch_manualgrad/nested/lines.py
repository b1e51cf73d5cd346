"""The lines of a batch with several ragged dims: its entries along one dim, contiguous."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .packing import packed_from_flat, row_strides
from .ragged import Ragged

__all__ = ["Lines"]


class Lines:
    """A batch with several ragged dims, whose entries are reordered so that those along one dim are contiguous.

    Attributes:
        values: (N,), the entries in that order: component by component, line by line.
        back: (N,), the index in ``values`` of each entry of the batch.
    """

    def __init__(self, x: Ragged, dim: int) -> None:
        self.batch, self.dim = x, dim
        self.sizes = x.component_sizes()
        step, size = row_strides(self.sizes)[:, dim - 1], self.sizes[:, dim - 1]
        which = x.segment_ids()
        start, step, size = x.offsets[which], step[which], size[which]
        here = torch.arange(len(which), device=x.offsets.device)
        local = here - start
        along = local // step % size
        line = local // (step * size) * step + local % step
        self.back = start + line * size + along
        order = torch.empty_like(here).scatter(0, self.back, here)
        self.values = x.values.index_select(0, order)
        self._along = along[order]

    def offsets(self) -> Tensor:
        """Where lines begin, for the largest possible number of lines; surplus lines are empty. Does not synchronize."""
        line = (self._along == 0).cumsum(0)
        return torch.searchsorted(line, torch.arange(1, len(line) + 2, device=line.device))

    def reduced(self, keepdim: bool) -> tuple[Tensor, Callable[[Tensor], Ragged]]:
        """Where lines begin, including empty lines, and a function that makes a nested tensor from one value per line.

        Synchronizes, because the number of lines depends on the sizes.
        """
        x, at = self.batch, self.dim - 1
        others = torch.cat([self.sizes[:, :at], self.sizes[:, at + 1 :]], 1)
        counts = others.prod(1)
        count = int(counts.sum())
        which = torch.repeat_interleave(counts, output_size=count)
        line = torch.arange(count, device=counts.device) - (counts.cumsum(0) - counts)[which]
        starts = x.offsets[which] + line * self.sizes[which, at]
        offsets = torch.cat([starts, torch.full_like(starts[:1], len(self.back)) if count else starts.new_zeros(1)])

        shape = [n for d, n in enumerate(x.shape) if d != self.dim]
        ragged = [d - 1 for d, n in enumerate(shape) if n is None]
        lengths = counts if len(ragged) > 1 else others[:, ragged[0]]
        begins = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(x.offsets.dtype)

        def rebuilt(flat: Tensor) -> Ragged:
            if len(ragged) > 1:
                full = shape if not keepdim else [*shape[: self.dim], 1, *shape[self.dim :]]
                return Ragged(flat, begins, full, others[:, ragged].to(x.offsets.dtype))
            total = int(lengths.sum())
            values = packed_from_flat(flat, begins, [total if n is None else n for n in shape[1:]], ragged[0])
            if not keepdim:
                return Ragged(values, begins, shape)
            return Ragged(values.unsqueeze(at), begins, [*shape[: self.dim], 1, *shape[self.dim :]])

        return offsets, rebuilt
