"""Conversion of packed values to padded dense ones, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import cumulated, readable, segments

__all__ = ["filled", "taken"]


def filled(values: Tensor, dim: int, value: float, positions: Tensor, inside: Tensor) -> Tensor:
    """``values`` at ``positions`` along ``dim``, ``value`` where not ``inside``. The dims of ``positions`` replace ``dim``."""
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
        raise IndexError(f"ragged_dim: {ragged_dim} is not a component dim of a tensor of shape {list(padded.shape)}")
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
