"""Nested tensors in pieces and in other layouts: split, chunk, unbind, transpose, padding; see `selection`."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .conversion import on_nested
from .packing import row_strides, strided_positions
from .ragged import Ragged
from .selection import components_in, read_sizes, select, slice

__all__ = [
    "chunk",
    "dropout",
    "split",
    "split_with_sizes",
    "to_padded_tensor",
    "transpose",
    "unbind",
]


@on_nested(views=True)
def split_with_sizes(x: Ragged, split_sizes: Sequence[int], dim: int = 0) -> list[Ragged]:
    """Pieces of these sizes along a dim that has one size in all components.

    Args:
        x: the batch.
        split_sizes: not negative; their sum is the size of ``dim``.
        dim: 0, a dense dim, or a ragged dim whose sizes happen to agree. The call synchronizes with a GPU, except along
            dense dims.

    Returns:
        A list of the kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: components whose sizes differ in ``dim``, which cannot be split into the same pieces; or sizes that
            do not add up.

    References:
        ATen _nested_split_with_sizes_backward, which for the jagged layout ends the process.
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
    return [components_in(x, part, range(a, b)) for part, (a, b) in zip(parts, ranges)]


@on_nested(views=True)
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


@on_nested(views=True)
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


@on_nested(views=True)
def unbind(x: Ragged, dim: int = 0) -> list[Tensor] | list[Ragged]:
    """The components along dim 0; along another dim the entries at each index, as `select` returns them.

    Args:
        x: the batch.
        dim: 0, which synchronizes with a GPU, or a dim that has one size in all components.

    Returns:
        A list of tensors, or of the kind of ``x``.

    Raises:
        IndexError: no such dim.
        ValueError: components whose sizes differ in ``dim``.

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


@on_nested(views=True)
def transpose(x: Ragged, dim0: int, dim1: int) -> Ragged:
    """Every component with two dims exchanged; a ragged dim may move. With one ragged dim it shares memory.

    Args:
        x: the batch.
        dim0: a dim of the components.
        dim1: a dim of the components.

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
    """Pad the components with ``padding`` to common sizes, by default the largest; see `Ragged.to_padded`.

    Args:
        x: the batch.
        padding: the value.
        output_size: the result's shape, at least as large as the components in the ragged dims and the same in the others;
            None for the largest sizes.

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
        raise ValueError(f"output_size: {list(output_size)} does not fit {x.summary()}")
    return x.to_padded(padding, [output_size[d] for d in x.ragged_dims])


@on_nested
def dropout(x: Ragged, p: float = 0.5, training: bool = True) -> Ragged:
    """Set entries to zero with probability ``p`` and divide the others by $1 - p$.

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


def _dense_size(x: Ragged, dim: int, what: str) -> int:
    sizes = read_sizes(x, dim)
    if len(sizes) != 1:
        raise ValueError(f"dim: cannot {what} along {dim}, a ragged dim of {x.summary()} with sizes {sorted(sizes)}")
    return sizes.pop()
