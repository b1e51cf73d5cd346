"""Positions of component entries in a buffer, and the buffer in other formats: flat, packed and padded.

Only `taken` synchronizes, if it is not told the total.

*Flat* is the common format: components one after the other, each row-major, as in torch's strided nested tensors.
*Packed* is a `Ragged` with one ragged dim: components concatenated along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "cumulated",
    "filled",
    "flat_from_packed",
    "offsets_of",
    "packed_from_flat",
    "ragged_shape",
    "readable",
    "row_strides",
    "segments",
    "strided_positions",
    "taken",
]


def readable(numbers: Tensor) -> bool:
    """Whether the contents can be read without synchronizing with a device, and outside of a graph."""
    return numbers.device.type == "cpu" and type(numbers) is Tensor and not torch.compiler.is_compiling()


def cumulated(lengths: Tensor) -> Tensor:
    """Offsets: the sum of the lengths in front of each component, and the sum of all lengths."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths.dtype)


def segments(offsets: Tensor, count: int) -> Tensor:
    """The component of each of ``count`` positions, (count,)."""
    positions = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.bucketize(positions, offsets[1:], right=True).clamp(max=max(offsets.shape[0] - 2, 0))


def row_strides(sizes: Tensor) -> Tensor:
    """The strides of row-major components of sizes (B, D): (B, D)."""
    return torch.cat([sizes[:, 1:], sizes.new_ones(sizes.shape[0], 1)], 1).flip(1).cumprod(1).flip(1)


def strided_positions(sizes: Tensor, strides: Tensor, starts: Tensor, total: int | None = None) -> Tensor:
    """The positions of the entries of strided components, component by component, in row-major order.

    Args:
        sizes: (B, D), integers.
        strides: (B, D), integers.
        starts: (B,): the position of each component's first entry.
        total: the number of entries; None: it is read from ``sizes``, which synchronizes with a GPU.

    Returns:
        (total,), int64.
    """
    counts = sizes.prod(1)
    which = torch.repeat_interleave(counts, output_size=total)
    rest = torch.arange(which.shape[0], device=sizes.device) - (counts.cumsum(0) - counts)[which]
    positions = starts[which]
    for d in reversed(range(sizes.shape[1])):
        size = sizes[which, d]
        positions = positions + rest % size * strides[which, d]
        rest = rest // size
    return positions


def _packed_rows(offsets: Tensor, before: int, count: int) -> Tensor:
    """The index of each row of a packed buffer among the rows of the flat one, (before * count,)."""
    which = segments(offsets, count)
    start, lengths = offsets[which], offsets.diff()[which]
    local = torch.arange(count, device=offsets.device) - start
    return (start * before + local + torch.arange(before, device=offsets.device)[:, None] * lengths).flatten()


def packed_from_flat(flat: Tensor, offsets: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """The buffer of this ``shape`` with components concatenated along ``dim``, from the flat buffer. Differentiable."""
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    if before != 1:
        rows = flat.reshape(before * shape[dim], after)
        flat = rows.index_select(0, _packed_rows(offsets, before, shape[dim]))
    return flat.reshape(tuple(shape))


def flat_from_packed(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """The inverse of `packed_from_flat`: (N,). Differentiable."""
    before, after = math.prod(values.shape[:dim]), math.prod(values.shape[dim + 1 :])
    if before == 1:
        return values.reshape(-1)
    rows = _packed_rows(offsets, before, values.shape[dim])
    back = torch.empty_like(rows).scatter(0, rows, torch.arange(len(rows), device=rows.device))
    return values.reshape(before * values.shape[dim], after).index_select(0, back).reshape(-1)


def ragged_shape(sizes: Sequence[Sequence[int]], ragged_dims: Sequence[int] | None) -> list[int | None]:
    """The shape of components of these sizes, with None in the dims that differ or are named."""
    differ = [d for d, n in enumerate(zip(*sizes), 1) if len(set(n)) > 1]
    chosen = list(ragged_dims) if ragged_dims is not None else differ or [1]
    dims = len(sizes[0])
    if not chosen or not all(1 <= d <= dims for d in chosen) or not set(differ) <= set(chosen):
        raise ValueError(f"ragged_dims: got {chosen}, but components of {dims} dims differ in dims {differ}")
    return [len(sizes), *(None if d in chosen else n for d, n in enumerate(sizes[0], 1))]


def offsets_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where components of these lengths begin, and the last ends."""
    at = [0]
    for n in lengths:
        at.append(at[-1] + n)
    return torch.tensor(at, device=device)


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
