"""The structure of nested tensors: select, slice, split, chunk, unbind, transpose, padding.

All of it is indexing, whose derivative scatters what was gathered: transparent torch code, linear in the values,
differentiable in every mode. With one ragged dim, dense dims are indexed directly and the ragged one position by
position; with several, sizes, strides and starts describe the result, as in a strided view, and it is gathered entry by
entry.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .conversion import on_nested
from .packing import readable, row_strides, strided_positions
from .ragged import Ragged, cumulated

__all__ = [
    "chunk",
    "dropout",
    "narrow",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "to_padded_tensor",
    "transpose",
    "unbind",
]


@on_nested
def select(x: Ragged, dim: int, index: int) -> Ragged | Tensor:
    """The entries at ``index`` along ``dim`` of every component; along dim 0, one component.

    Args:
        x: the batch.
        dim: any; negative from the end. Along the batch it synchronizes with a GPU.
        index: negative from the end, along a ragged dim from each component's own.

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


@on_nested
def slice(x: Ragged, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Ragged:
    """``start:end:step`` along ``dim`` of every component, with Python's meaning; along dim 0, of the components.

    Args:
        x: the batch.
        dim: any. Along the batch and along ragged dims the new lengths have to be read, which synchronizes with a GPU.
        start: may be negative, None or beyond the end; along a ragged dim they count from each component's own end.
        end: may be negative, None or beyond the end; along a ragged dim they count from each component's own end.
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


@on_nested
def narrow(x: Ragged, dim: int, start: int, length: int) -> Ragged:
    """``length`` entries from ``start`` along any dim: `slice` that refuses a range outside of any one component.

    Args:
        x: the batch.
        dim: any; of a ragged one the sizes are read, which synchronizes with a GPU.
        start: not negative.
        length: not negative.

    Returns:
        The kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: a range that is not inside.

    References:
        ATen narrow.
    """
    dim = x.wrapped(dim)
    size = builtins.min(_read_sizes(x, dim), default=0)
    if not 0 <= start <= start + length <= size:
        raise ValueError(f"start, length: {start} and {length} are out of range for dim {dim} of size {size}")
    return slice(x, dim, start, start + length)


@on_nested
def split_with_sizes(x: Ragged, split_sizes: Sequence[int], dim: int = 0) -> list[Ragged]:
    """Pieces of these sizes along a dim in which all components are of one size.

    Args:
        x: the batch.
        split_sizes: not negative; their sum is the size of ``dim``.
        dim: 0, a dense dim, or a ragged one in which the sizes happen to agree. It synchronizes with a GPU, except on
            dense dims.

    Returns:
        A list of the kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: components whose sizes differ in ``dim``, which cannot be split into the same pieces; or sizes that
            do not add up.

    References:
        ATen _nested_split_with_sizes_backward; that of the jagged layout ends the process.
    """
    dim = x.wrapped(dim)
    size = _dense_size(x, dim, "split")
    if sum(split_sizes) != size or any(n < 0 for n in split_sizes):
        raise ValueError(f"split_sizes: {list(split_sizes)} do not add up to {size}, the size of dim {dim}")
    bounds = [0, *itertools.accumulate(split_sizes)]
    ranges = list(zip(bounds, bounds[1:]))
    if dim and (x.sizes is not None or x.shape[dim] is None):
        return [slice(x, dim, a, b) for a, b in ranges]
    if dim:
        shapes = [[*x.shape[:dim], n, *x.shape[dim + 1 :]] for n in split_sizes]
        return [x.like(v, shape) for v, shape in zip(x.values.split(list(split_sizes), dim - 1), shapes)]
    at = x.read_offsets()
    parts = x.values.split([at[b] - at[a] for a, b in ranges], x.packed_dim)
    return [_some(x, part, range(a, b)) for part, (a, b) in zip(parts, ranges)]


@on_nested
def split(x: Ragged, split_size: int | Sequence[int], dim: int = 0) -> list[Ragged]:
    """Pieces of ``split_size`` (the last may be smaller) along ``dim``, as `torch.split`; or `split_with_sizes`.

    Args:
        x: the batch.
        split_size: positive, or a list of sizes.
        dim: as in `split_with_sizes`.

    Returns:
        A list of the kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: as `split_with_sizes`; or a ``split_size`` that is not positive.

    References:
        ATen split.Tensor.
    """
    if not isinstance(split_size, int):
        return split_with_sizes(x, split_size, dim)
    if split_size <= 0:
        raise ValueError(f"split_size: expected a positive number, got {split_size}")
    size = _dense_size(x, x.wrapped(dim), "split")
    return split_with_sizes(x, [builtins.min(split_size, size - at) for at in range(0, size, split_size)] or [0], dim)


@on_nested
def chunk(x: Ragged, chunks: int, dim: int = 0) -> list[Ragged]:
    """At most ``chunks`` pieces of one size (the last may be smaller) along ``dim``, as `torch.chunk`.

    Args:
        x: the batch.
        chunks: positive.
        dim: as in `split_with_sizes`.

    Returns:
        A list of the kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: as `split_with_sizes`; or ``chunks`` that is not positive.

    References:
        ATen chunk_backward_nested.
    """
    dim = x.wrapped(dim)
    return split_with_sizes(x, chunk_sizes(_dense_size(x, dim, "chunk"), chunks), dim)


@on_nested
def unbind(x: Ragged, dim: int = 0) -> list[Tensor] | list[Ragged]:
    """The components along dim 0; along another dim its entries, as `select` returns each.

    Args:
        x: the batch.
        dim: 0, which synchronizes with a GPU, or a dim in which all components are of one size.

    Returns:
        A list of tensors, or of the kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: components that differ in ``dim``.

    References:
        ATen unbind_backward_nested, unbind_backward_nested_jagged.
    """
    dim = x.wrapped(dim)
    if dim == 0:
        return x.components()
    size = _dense_size(x, dim, "unbind")
    if x.sizes is not None or x.shape[dim] is None:
        return [select(x, dim, i) for i in range(size)]
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    return [x.like(v, shape) for v in x.values.unbind(dim - 1)]


@on_nested
def transpose(x: Ragged, dim0: int, dim1: int) -> Ragged:
    """Every component with two dims exchanged; a ragged dim may move. With one ragged dim it shares memory.

    Args:
        x: the batch.
        dim0: dims of the components.
        dim1: dims of the components.

    Returns:
        The kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: the batch dim.

    References:
        ATen transpose.int.
    """
    a, b = x.wrapped(dim0, name="dim0"), x.wrapped(dim1, name="dim1")
    if a != b and 0 in (a, b):
        raise ValueError(f"dim0, dim1: the batch dim cannot be exchanged, got {dim0} and {dim1}")
    if a == b:
        return x
    order = [b if d == a else a if d == b else d for d in range(x.dim())]
    shape = [x.shape[d] for d in order]
    if x.sizes is None:
        return x.like(x.values.transpose(a - 1, b - 1), shape)
    sizes = x.component_sizes()
    moved = [d - 1 for d in order[1:]]
    positions = strided_positions(sizes[:, moved], row_strides(sizes)[:, moved], x.offsets[:-1], len(x.values))
    return Ragged.from_flat(x.values.index_select(0, positions), sizes[:, moved], shape)


@on_nested
def to_padded_tensor(x: Ragged, padding: float, output_size: Sequence[int] | None = None) -> Tensor:
    """Components filled up with ``padding`` to common sizes, by default the largest; `Ragged.to_padded`.

    Args:
        x: the batch.
        padding: the value.
        output_size: the result's shape, at least as long in the ragged dims and the same in the others; None for the
            largest.

    Returns:
        (B, ...), dense.

    Raises:
        ValueError: an ``output_size`` that does not fit.

    References:
        ATen to_padded_tensor and _nested_from_padded_backward, each the other's derivative.
    """
    if output_size is None:
        return x.to_padded(padding)
    if len(output_size) != x.dim() or any(n not in (None, m) for n, m in zip(x.shape, output_size)):
        raise ValueError(f"output_size: {list(output_size)} does not fit {x!r}")
    return x.to_padded(padding, [output_size[d] for d in x.ragged_dims])


@on_nested
def dropout(x: Ragged, p: float = 0.5, training: bool = True) -> Ragged:
    """Set entries to zero with probability ``p`` and divide the others by 1 - p.

    Args:
        x: the batch.
        p: the probability.
        training: False returns the values unchanged.

    Returns:
        The components of ``x``.

    Raises:
        ValueError: ``p`` outside of 0 to 1.

    References:
        ATen dropout.
    """
    return x.like(F.dropout(x.values, p, training))


# -- shared -----------------------------------------------------------------------------------------------------------


def chunk_sizes(size: int, chunks: int) -> list[int]:
    """The sizes into which torch.chunk divides ``size``."""
    if chunks <= 0:
        raise ValueError(f"chunks: expected a positive number, got {chunks}")
    each = -(-size // chunks)
    return [min(each, size - at) for at in range(0, size, each)] if size else [0] * chunks


def _read_sizes(x: Ragged, dim: int) -> set[int]:
    """The set of sizes in ``dim``; those of a ragged dim are read, which synchronizes with a GPU."""
    size = x.batch if dim == 0 else x.shape[dim]
    if size is not None:
        return {size}
    at, sizes = x.read()
    if sizes is None:
        return {b - a for a, b in zip(at, at[1:])}
    return {row[x.ragged_dims.index(dim)] for row in sizes}


def _dense_size(x: Ragged, dim: int, what: str) -> int:
    sizes = _read_sizes(x, dim)
    if len(sizes) != 1:
        raise ValueError(f"dim: cannot {what} along {dim}, a ragged dim of {x!r} with sizes {sorted(sizes)}")
    return sizes.pop()


def _some(x: Ragged, values: Tensor, chosen: range) -> Ragged:
    """The chosen components of ``x``, in order, given their values."""
    pick = builtins.slice(chosen.start, max(chosen.stop, chosen.start), chosen.step)
    sizes = None if x.sizes is None else x.sizes[pick]
    return Ragged(values, cumulated(x.lengths[pick]), [len(chosen), *x.shape[1:]], sizes)


def _components(x: Ragged, chosen: range) -> Ragged:
    at = x.read_offsets()
    if chosen.step == 1 or not chosen:
        start, end = (at[chosen.start], at[chosen.stop]) if chosen else (0, 0)
        return _some(x, x.values.narrow(x.packed_dim, start, end - start), chosen)
    parts = x.values.split([b - a for a, b in zip(at, at[1:])], x.packed_dim)
    return _some(x, torch.cat([parts[b] for b in chosen], x.packed_dim), chosen)


def _clipped(lengths: Tensor, at: int) -> Tensor:
    """The position of ``at`` in components of these lengths, clipped as in Python's slices."""
    return torch.minimum((lengths + at if at < 0 else torch.full_like(lengths, at)).clamp(min=0), lengths)


def _local(x: Ragged, lengths: Tensor, dim: int, index: int) -> tuple[Tensor, Tensor | None]:
    """The position of ``index`` in each component, (B,), and whether it is inside; None if it is known to be in all."""
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
