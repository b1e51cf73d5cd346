"""A nested tensor as a dense one that is filled up, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .packing import cumulated, readable, row_strides, segments

if TYPE_CHECKING:
    from .ragged import Ragged

__all__ = ["padded", "taken"]


def padded(x: Ragged, value: float, length: int | Sequence[int] | None) -> Tensor:
    """`Ragged.to_padded`."""
    sizes = x.component_sizes()
    ragged = [d - 1 for d in x.ragged_dims]
    if length is None:
        at, read = x.read()
        rows = [[b - a] for a, b in zip(at, at[1:])] if read is None else read
        length = [max(column) for column in zip(*rows)] if rows else [0] * len(ragged)
    length = [length] if isinstance(length, int) else list(length)
    if len(length) != len(ragged) or min(length) < 0:
        raise ValueError(f"length: expected {len(ragged)} sizes that are not negative, got {length}")
    if readable(sizes) and x.batch and (sizes[:, ragged].amax(0) > torch.tensor(length)).any():
        raise ValueError(f"length: {length} is shorter than components of {sizes[:, ragged].amax(0).tolist()}")
    if x.sizes is None:
        return _padded_rows(x, value, length[0])
    full = [n if n is not None else length[ragged.index(d)] for d, n in enumerate(x.shape[1:])]
    positions = x.offsets[:-1].reshape([-1] + [1] * len(full))
    inside = torch.ones_like(positions, dtype=torch.bool)
    for d, n in enumerate(full):
        coordinate = torch.arange(n, device=sizes.device).reshape([n] + [1] * (len(full) - d - 1))
        of_dim = [-1] + [1] * len(full)
        positions = positions + coordinate * row_strides(sizes)[:, d].reshape(of_dim)
        inside = inside & (coordinate < sizes[:, d].reshape(of_dim))
    return _filled(x.values, 0, value, positions, inside)


def _padded_rows(x: Ragged, value: float, length: int) -> Tensor:
    local = torch.arange(length, device=x.offsets.device)
    rows = _filled(x.values, x.packed_dim, value, x.offsets[:-1, None] + local, local < x.lengths[:, None])
    return rows.movedim(x.packed_dim, 0)


def _filled(values: Tensor, dim: int, value: float, positions: Tensor, inside: Tensor) -> Tensor:
    """``values`` at ``positions`` along ``dim``, ``value`` where not ``inside``. Their dims replace ``dim``."""
    end = values.shape[dim]
    filler = values.new_full([1 if d == dim else n for d, n in enumerate(values.shape)], value)
    extended = torch.cat([values, filler], dim)
    found = extended.index_select(dim, torch.where(inside, positions, end).flatten())
    return found.unflatten(dim, positions.shape)


def taken(
    padded: Tensor, lengths: Tensor | None, offsets: Tensor | None, ragged_dim: int, total: int | None
) -> tuple[Tensor, Tensor, int]:
    """The values, offsets and ragged dim of `Ragged.from_padded`."""
    if (lengths is None) == (offsets is None):
        raise ValueError("lengths, offsets: expected one of the two")
    if not -padded.dim() <= ragged_dim < padded.dim() or ragged_dim % padded.dim() == 0:
        raise IndexError(f"ragged_dim: {ragged_dim} is no component dim of a tensor of shape {list(padded.shape)}")
    given = offsets if lengths is None else lengths
    assert given is not None
    ragged_dim %= padded.dim()
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths or offsets: expected int32 or int64, got {given.dtype}")
    batch, longest = padded.shape[0], padded.shape[ragged_dim]
    if given.shape != (batch + (lengths is None),):
        raise ValueError(
            f"lengths or offsets: shape {list(given.shape)} does not fit {batch} components of {list(padded.shape)}"
        )
    if offsets is None:
        offsets = cumulated(given)
    lengths = offsets.diff()
    if readable(lengths) and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= longest:
        raise ValueError(f"lengths: expected from 0 to {longest}, got {lengths.tolist()}")
    total = int(offsets[-1]) if total is None else total
    which = segments(offsets, total)
    positions = which * longest + torch.arange(total, device=offsets.device) - offsets[which]
    if total and not batch * longest:
        raise ValueError(f"total: {total} positions cannot come from padded of shape {list(padded.shape)}")
    rows = padded.movedim(ragged_dim, 1).flatten(0, 1)
    values = rows.index_select(0, positions.clamp(0, max(batch * longest - 1, 0))).movedim(0, ragged_dim - 1)
    return values, offsets, ragged_dim
