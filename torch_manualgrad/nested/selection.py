"""Parts of nested tensors: select, slice, narrow.

All functions here index with plain torch code. They are linear in the values and differentiable in every mode; the
derivative scatters the gathered entries. With one ragged dim, dense dims are indexed directly and the ragged one position by
position. With several, sizes, strides and starts describe the result, as in a strided view, and it is gathered entry by
entry.
"""

from __future__ import annotations

import builtins

import torch
from torch import Tensor

from .conversion import on_nested
from .packing import cumulated, readable, row_strides, strided_positions
from .ragged import Ragged

__all__ = ["components_in", "narrow", "read_sizes", "select", "slice"]


@on_nested(views=True)
def select(x: Ragged, dim: int, index: int) -> Ragged | Tensor:
    """The entries at ``index`` along ``dim`` of every component; along dim 0, one component.

    Args:
        x: the batch.
        dim: any dim; may be negative. Along the batch, the call synchronizes with a GPU.
        index: may be negative; along a ragged dim, it counts from each component's own end.

    Returns:
        Along dim 0 the component, a tensor; along the only ragged dim a tensor (B, ...); else the kind of ``x``,
        without ``dim``.

    Raises:
        IndexError: no such dim, or an index out of range. For a ragged dim this is raised on the CPU only: on a GPU the
            lengths are not read, and such a component gives nan (0 for integers).

    References:
        ATen _nested_select_backward, whose strided form ends the process for index -1 along the batch.
    """
    dim = x.wrapped(dim)
    if dim == 0:
        if not -x.batch <= index < x.batch:
            raise IndexError(f"index: {index} is out of range for {x.batch} components")
        return x.component(index % x.batch)
    size = x.shape[dim]
    if size is not None and not -size <= index < size:
        raise IndexError(f"index: {index} is out of range for dim {dim} of size {size}")
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    if size is not None and x.sizes is None:
        return x.like(x.values.select(dim - 1, index), shape)
    sizes = x.component_sizes()
    local, inside = _local(x, sizes[:, dim - 1], dim, index)
    if x.sizes is None:
        picked = _at(x.values, x.packed_dim, x.offsets[:-1] + local, inside).movedim(x.packed_dim, 0)
        return picked
    strides = row_strides(sizes)
    starts = x.offsets[:-1] + local * strides[:, dim - 1]
    kept = [d for d in range(x.dim() - 1) if d != dim - 1]
    sizes = sizes[:, kept]
    positions = strided_positions(sizes, strides[:, kept], starts)
    if inside is not None:
        inside = torch.repeat_interleave(inside, sizes.prod(1), output_size=len(positions))
    return Ragged.from_flat(_at(x.values, 0, positions, inside), sizes, shape)


@on_nested(views=True)
def slice(x: Ragged, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Ragged:
    """``start:end:step`` along ``dim`` of every component, with Python's meaning; along dim 0, of the components.

    Args:
        x: the batch.
        dim: any dim. Along the batch and along ragged dims the new lengths have to be read, which synchronizes with a GPU.
        start: may be None, beyond the end, or negative, which along a ragged dim counts from each component's own end.
        end: may be None, beyond the end, or negative, which along a ragged dim counts from each component's own end.
        step: positive.

    Returns:
        The kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: a step that is not positive.

    References:
        ATen slice.Tensor.
    """
    dim = x.wrapped(dim)
    if step <= 0:
        raise ValueError(f"step: expected a positive number, got {step}")
    if dim == 0:
        return _components(x, range(x.batch)[start:end:step])
    size = x.shape[dim]
    shape = list(x.shape)
    if size is not None:
        shape[dim] = len(range(size)[start:end:step])
        if x.sizes is None:
            return x.like(x.values[(builtins.slice(None),) * (dim - 1) + (builtins.slice(start, end, step),)], shape)
    sizes = x.component_sizes()
    lengths = sizes[:, dim - 1]
    begin = _clipped(lengths, 0 if start is None else start)
    finish = lengths if end is None else _clipped(lengths, end)
    kept = ((finish - begin).clamp(min=0) + (step - 1)) // step
    if x.sizes is None:
        positions = strided_positions(kept[:, None], torch.full_like(kept[:, None], step), x.offsets[:-1] + begin)
        offsets = cumulated(kept).to(x.offsets.dtype)
        return Ragged(x.values.index_select(x.packed_dim, positions), offsets, shape)
    strides = row_strides(sizes)
    starts = x.offsets[:-1] + begin * strides[:, dim - 1]
    scale = torch.tensor([step if d == dim - 1 else 1 for d in range(x.dim() - 1)], device=sizes.device)
    sizes = torch.cat([sizes[:, : dim - 1], kept[:, None], sizes[:, dim:]], 1)
    positions = strided_positions(sizes, strides * scale, starts)
    return Ragged.from_flat(x.values.index_select(0, positions), sizes, shape)


@on_nested(views=True)
def narrow(x: Ragged, dim: int, start: int, length: int) -> Ragged:
    """``length`` entries from ``start`` along any dim: like `slice`, but every component must contain the range.

    Args:
        x: the batch.
        dim: any dim. The sizes of a ragged dim are read, which synchronizes with a GPU.
        start: not negative.
        length: not negative.

    Returns:
        The kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: a range that some component does not contain.

    References:
        ATen narrow.
    """
    dim = x.wrapped(dim)
    size = builtins.min(read_sizes(x, dim) or {0})
    if not 0 <= start <= start + length <= size:
        raise ValueError(f"start, length: {start} and {length} are out of range for dim {dim} of size {size}")
    return slice(x, dim, start, start + length)


def _clipped(lengths: Tensor, at: int) -> Tensor:
    """The position of ``at`` in components of these lengths, clipped as in Python's slices."""
    return torch.minimum((lengths + at if at < 0 else torch.full_like(lengths, at)).clamp(min=0), lengths)


def _local(x: Ragged, lengths: Tensor, dim: int, index: int) -> tuple[Tensor, Tensor | None]:
    """The position of ``index`` in each component, (B,), and whether it is inside; None if it is known to be inside of all."""
    local = lengths + index if index < 0 else torch.full_like(lengths, index)
    if x.shape[dim] is not None:
        return local, None
    if not readable(x.offsets):
        return local, (local >= 0) & (local < lengths)
    at, sizes = x.read()
    numbers = [b - a for a, b in zip(at, at[1:])]
    if sizes is not None:
        numbers = [row[x.ragged_dims.index(dim)] for row in sizes]
    for b, n in enumerate(numbers):
        if not -n <= index < n:
            raise IndexError(f"index: {index} is out of range for component {b}, whose size in dim {dim} is {n}")
    return local, None


def _at(values: Tensor, dim: int, positions: Tensor, inside: Tensor | None) -> Tensor:
    """``values`` at ``positions`` along ``dim``; nan where not ``inside``."""
    if inside is None:
        return values.index_select(dim, positions)
    if positions.shape[0] and not values.shape[dim]:
        raise IndexError("index: out of range, all components are empty")
    picked = values.index_select(dim, positions.clamp(min=0, max=max(values.shape[dim] - 1, 0)))
    outside = inside.logical_not().reshape([-1] + [1] * (values.dim() - dim - 1))
    return picked.masked_fill(outside, float("nan") if values.is_floating_point() or values.is_complex() else 0)


def components_in(x: Ragged, values: Tensor, chosen: range) -> Ragged:
    """The chosen components of ``x``, in order, given their values."""
    pick = builtins.slice(chosen.start, max(chosen.stop, chosen.start), chosen.step)
    sizes = None if x.sizes is None else x.sizes[pick]
    return Ragged(values, cumulated(x.lengths[pick]), [len(chosen), *x.shape[1:]], sizes)


def _components(x: Ragged, chosen: range) -> Ragged:
    at = x.read_offsets()
    if chosen.step == 1 or not chosen:
        start, end = (at[chosen.start], at[chosen.stop]) if chosen else (0, 0)
        return components_in(x, x.values.narrow(x.packed_dim, start, end - start), chosen)
    parts = x.values.split([b - a for a, b in zip(at, at[1:])], x.packed_dim)
    return components_in(x, torch.cat([parts[b] for b in chosen], x.packed_dim), chosen)


def read_sizes(x: Ragged, dim: int) -> set[int]:
    """The set of sizes in ``dim``; those of a ragged dim are read, which synchronizes with a GPU."""
    size = x.batch if dim == 0 else x.shape[dim]
    if size is not None:
        return {size}
    at, sizes = x.read()
    if sizes is None:
        return {b - a for a, b in zip(at, at[1:])}
    return {row[x.ragged_dims.index(dim)] for row in sizes}
