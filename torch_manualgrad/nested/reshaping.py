"""Changes of the shape of a `Ragged` in its regular dims, which are those that are neither the batch nor ragged.

They act on the values as a whole, and are differentiable in every mode. A ragged dim is written as None, as in
``x.shape``, or -1. Dim 0 and a ragged dim 1 together are the packed dim of the values: merging them gives an ordinary
tensor, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import described
from .conversion import require_same_structure
from .ragged import Ragged

__all__ = ["SHAPES", "batch", "one_ragged_dim", "regular_dim"]

# the functions that a Ragged has under torch's names
SHAPES = (
    "cat",
    "expand",
    "flatten",
    "movedim",
    "permute",
    "repeat",
    "reshape",
    "squeeze",
    "stack",
    "unflatten",
    "unsqueeze",
)


def batch(x: Any, what: str) -> Ragged:
    """The first argument of a function, which torch also calls if only another argument is a `Ragged`."""
    if not isinstance(x, Ragged):
        raise TypeError(f"{what}: expected a Ragged as the first argument, got {described(x)}")
    return x


def one_ragged_dim(x: Ragged, what: str) -> int:
    """The only ragged dim; ``what`` is the function's name in errors."""
    if batch(x, what).sizes is not None:
        raise ValueError(f"{what}: expected one ragged dim, got {x.summary()}")
    return x.ragged_dims[0]


def regular_dim(x: Ragged, dim: int, what: str, name: str = "dim") -> int:
    """``dim`` as a number from 0, checked to be neither the batch nor ragged."""
    ragged = one_ragged_dim(x, what)
    dim = x.wrapped(dim, name=name)
    if dim in (0, ragged):
        kind = "the batch" if dim == 0 else "ragged"
        raise ValueError(f"{name}: {what} takes a regular dim; dim {dim} of {x.summary()} is {kind}")
    return dim


def _as_sizes(shape: Sequence[Any]) -> list[int | None]:
    given = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple, torch.Size)) else list(shape)
    if not all(n is None or isinstance(n, (int, torch.SymInt)) for n in given):
        raise TypeError(f"shape: expected numbers, and None for a ragged dim, got {given}")
    return given


def reshape(x: Ragged, *shape: Any) -> Ragged | Tensor:
    """Reshape the regular dims, as `torch.reshape`, or merge the batch and the ragged dim.

    Args:
        x: with one ragged dim.
        shape: the shape of the result, with None or -1 for the ragged dim. The regular dims in front of the ragged dim
            keep their number of entries, and so do those after it; one size in each part may be -1. To merge batch and
            ragged dim, if dim 1 is ragged: -1 and the regular sizes.

    Returns:
        A `Ragged`; a tensor (T, ...) of all entries if the shape has no ragged dim.

    Raises:
        ValueError: a shape that does not fit, or several ragged dims.
        TypeError: sizes that are not numbers or None.
    """
    ragged, given = one_ragged_dim(x, "reshape"), _as_sizes(shape)
    front, back = x.values.shape[: ragged - 1], x.values.shape[ragged:]
    total = x.values.shape[ragged - 1]
    for i in range(1, len(given)):
        if given[i] not in (None, -1) or None in given and given[i] is not None:
            continue
        if given[0] not in (x.batch, -1, None):
            break
        before, after = _filled(given[1:i], front), _filled(given[i + 1 :], back)
        if before is not None and after is not None:
            return x.like(x.values.reshape(*before, total, *after), [x.batch, *before, None, *after])
    if ragged == 1 and given and given[0] in (-1, total) and None not in given:
        after = _filled(given[1:], back)
        if after is not None:
            return x.values.reshape(total, *after)
    raise ValueError(
        f"shape: {tuple(given)} does not fit {x.summary()}, whose ragged dim keeps its place, as None or -1"
    )


def _filled(sizes: Sequence[int | None], like: Sequence[int]) -> list[int] | None:
    """The sizes with -1 replaced; None if their number of entries differs from that of ``like``."""
    known = [n for n in sizes if n is not None and n != -1]
    if len(known) < len(sizes) - 1 or None in sizes:
        return None
    count, given = math.prod(like), math.prod(known)
    if len(known) == len(sizes):
        return known if count == given else None
    if not given or count % given:
        return None
    return [count // given if n == -1 else n for n in sizes if n is not None]


def flatten(x: Ragged, start_dim: int = 0, end_dim: int = -1) -> Ragged | Tensor:
    """Merge dims into one, as `torch.flatten`.

    Args:
        x: with one ragged dim.
        start_dim: the first dim: a regular dim, or 0 if dim 1 is ragged.
        end_dim: the last dim.

    Returns:
        A `Ragged`; with ``start_dim`` 0 a tensor of all entries, without padding: ``flatten(0, 1)`` of (B, *, C) is (T, C).

    Raises:
        IndexError: no such dim.
        ValueError: a ragged dim among others, or several ragged dims.
    """
    ragged = one_ragged_dim(x, "flatten")
    start, end = x.wrapped(start_dim, name="start_dim"), x.wrapped(end_dim, name="end_dim")
    if start > end:
        raise ValueError(f"start_dim, end_dim: expected the first and the last dim, got {start_dim} and {end_dim}")
    if start == 0 and ragged == 1 and end >= 1:
        return x.values.flatten(0, end - 1)
    if start == end:
        return x
    if start == 0 or start <= ragged <= end:
        raise ValueError(f"start_dim, end_dim: dims {start} to {end} of {x.summary()} are not all regular")
    values = x.values.flatten(start - 1, end - 1)
    return x.like(values, [*x.shape[:start], values.shape[start - 1], *x.shape[end + 1 :]])


def unflatten(x: Ragged, dim: int, sizes: Sequence[int]) -> Ragged:
    """Split a regular dim into several, as ``Tensor.unflatten``.

    Args:
        x: with one ragged dim.
        dim: a regular dim.
        sizes: the new sizes, whose product is the size of ``dim``; one may be -1.

    Returns:
        A `Ragged`.

    Raises:
        IndexError: no such dim.
        ValueError: ``dim`` is the batch or ragged, or several dims are ragged.
        RuntimeError: sizes that do not fit.
    """
    dim = regular_dim(x, dim, "unflatten")
    values = x.values.unflatten(dim - 1, tuple(sizes))
    return x.like(values, [*x.shape[:dim], *values.shape[dim - 1 : dim - 1 + len(sizes)], *x.shape[dim + 1 :]])


def unsqueeze(x: Ragged, dim: int) -> Ragged:
    """Insert a dim of size 1, as `torch.unsqueeze`.

    Args:
        x: with one ragged dim.
        dim: the new dim in the result, after the batch.

    Returns:
        A `Ragged`.

    Raises:
        IndexError: no such dim.
        ValueError: dim 0, or several ragged dims.
    """
    one_ragged_dim(x, "unsqueeze")
    if not -x.dim() - 1 <= dim <= x.dim():
        raise IndexError(f"dim: {dim} is out of range for a new dim of a nested tensor of {x.dim()} dims")
    dim %= x.dim() + 1
    if dim == 0:
        raise ValueError("dim: expected 1 or more, got 0; dim 0 is the batch")
    return x.like(x.values.unsqueeze(dim - 1), [*x.shape[:dim], 1, *x.shape[dim:]])


def squeeze(x: Ragged, dim: int | Sequence[int] | None = None) -> Ragged:
    """Remove regular dims of size 1, as `torch.squeeze`.

    Args:
        x: with one ragged dim.
        dim: regular dims, which stay if their size is not 1; None for all.

    Returns:
        A `Ragged`.

    Raises:
        IndexError: no such dim.
        ValueError: ``dim`` is the batch or ragged, or several dims are ragged.
    """
    one_ragged_dim(x, "squeeze")
    named = range(1, x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    chosen = [d if dim is None else regular_dim(x, d, "squeeze") for d in named]
    gone = [d for d in chosen if x.shape[d] == 1]
    if not gone:
        return x
    return x.like(x.values.squeeze([d - 1 for d in gone]), [n for d, n in enumerate(x.shape) if d not in gone])


def permute(x: Ragged, *dims: Any) -> Ragged:
    """Reorder the dims, as `torch.permute`; dim 0 stays first.

    Args:
        x: with one ragged dim.
        dims: all dims.

    Returns:
        A `Ragged`.

    Raises:
        IndexError: no such dim.
        ValueError: not every dim once, dim 0 in another place, or several ragged dims.
    """
    one_ragged_dim(x, "permute")
    given = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else list(dims)
    order = [x.wrapped(d, name="dims") for d in given]
    if sorted(order) != list(range(x.dim())) or order[0] != 0:
        raise ValueError(f"dims: expected 0 and then every other dim of {x.summary()} once, got {given}")
    return x.like(x.values.permute([d - 1 for d in order[1:]]), [x.shape[d] for d in order])


def movedim(x: Ragged, source: int | Sequence[int], destination: int | Sequence[int]) -> Ragged:
    """Move dims of the components, as `torch.movedim`.

    Args:
        x: with one ragged dim.
        source: dims, not the batch.
        destination: their places.

    Returns:
        The batch with its dims in another order.

    Raises:
        IndexError: no such dim.
        ValueError: the batch would move.
        RuntimeError: as in torch.
    """
    numbered = torch.empty(list(range(x.dim())), device="meta")  # each dim has its number as size
    moved = numbered.movedim(source, destination)  # type: ignore[arg-type]  # one overload for numbers, one for lists
    return permute(x, *moved.shape)


def repeat(x: Ragged, *sizes: Any) -> Ragged:
    """Copies along regular dims, as ``Tensor.repeat``.

    Args:
        x: with one ragged dim.
        sizes: a number of copies for each dim, 1 for the batch and the ragged dim.

    Returns:
        A `Ragged` with larger regular dims.

    Raises:
        ValueError: another number of sizes, or copies of the batch or along the ragged dim.
    """
    given, ragged = _as_sizes(sizes), one_ragged_dim(x, "repeat")
    if len(given) != x.dim() or given[0] != 1 or given[ragged] != 1:
        raise ValueError(f"sizes: expected {x.dim()}, and 1 for the batch and the ragged dim, got {given}")
    values = x.values.repeat(given[1:])  # type: ignore[arg-type]
    return x.like(values, [x.batch, *(None if d + 1 == ragged else n for d, n in enumerate(values.shape))])


def expand(x: Ragged, *sizes: Any) -> Ragged:
    """Repeat regular dims of size 1 without a copy, as ``Tensor.expand``.

    Args:
        x: with one ragged dim.
        sizes: the sizes of all dims; -1 or None for those that stay, including the batch and the ragged dim.

    Returns:
        A `Ragged`.

    Raises:
        ValueError: another number of sizes, another batch, a size for the ragged dim, or several ragged dims.
        RuntimeError: a size that does not fit.
    """
    ragged, given = one_ragged_dim(x, "expand"), _as_sizes(sizes)
    if len(given) != x.dim() or given[0] not in (-1, None, x.batch) or given[ragged] not in (-1, None):
        raise ValueError(f"sizes: {tuple(given)} does not fit {x.summary()}, whose batch and ragged dim stay")
    values = x.values.expand([-1 if n is None else n for n in given[1:]])
    return x.like(values, [None if d == ragged else n for d, n in enumerate((x.batch, *values.shape))])


def _batches(tensors: Any, what: str) -> list[Ragged]:
    given = list(tensors)
    if not given or not all(isinstance(x, Ragged) for x in given):
        raise TypeError(f"tensors: {what} expected a list of Ragged, got {[type(x).__name__ for x in given]}")
    for x in given:
        one_ragged_dim(x, what)
    return given


def cat(tensors: Sequence[Ragged], dim: int = 0) -> Ragged:
    """Concatenate batches, as `torch.cat`.

    Args:
        tensors: batches with one ragged dim, the same in all.
        dim: 0 for a batch of all components; the ragged dim to concatenate matching components, which synchronizes with a GPU;
            or a regular dim of batches with the same lengths.

    Returns:
        A `Ragged`.

    Raises:
        IndexError: no such dim.
        ValueError: batches that do not fit, or several ragged dims.
        TypeError: arguments other than `Ragged`.
    """
    given = _batches(tensors, "cat")
    first = given[0]
    dim = first.wrapped(dim)
    for i, x in enumerate(given[1:], 1):
        if x.ragged_dims != first.ragged_dims or any(
            a != b for d, (a, b) in enumerate(zip(x.shape, first.shape)) if d not in (0, dim)
        ):
            raise ValueError(f"tensors[{i}]: {x.summary()} does not fit {first.summary()} along dim {dim}")
    packed = first.packed_dim
    if dim == 0:
        ends = [0]
        for x in given:
            ends.append(ends[-1] + x.values.shape[packed])
        offsets = [x.offsets[i > 0 :] + end for i, (x, end) in enumerate(zip(given, ends))]
        shape = [sum(x.batch for x in given), *first.shape[1:]]
        return Ragged(torch.cat([x.values for x in given], packed), torch.cat(offsets), shape)
    if dim == packed + 1:
        if any(x.batch != first.batch for x in given):
            raise ValueError(f"tensors: expected the same number of components in each, got {[x.batch for x in given]}")
        if not first.batch:
            return first.like(torch.cat([x.values for x in given], packed))
        rows = zip(*[x.components() for x in given])
        return Ragged.from_components([torch.cat(row, packed) for row in rows], ragged_dims=[dim])
    for i, x in enumerate(given[1:], 1):
        require_same_structure(first, x, name=f"tensors[{i}]")
    values = torch.cat([x.values for x in given], dim - 1)
    return first.like(values, [*first.shape[:dim], values.shape[dim - 1], *first.shape[dim + 1 :]])


def stack(tensors: Sequence[Ragged], dim: int = 0) -> Ragged:
    """Stack batches with the same lengths along a new regular dim, as `torch.stack`.

    Args:
        tensors: batches with one ragged dim.
        dim: the new dim in the result, after the batch.

    Returns:
        A `Ragged`.

    Raises:
        IndexError: no such dim.
        ValueError: dim 0, batches that do not fit, or several ragged dims.
        TypeError: arguments other than `Ragged`.
    """
    given = _batches(tensors, "stack")
    return cat([unsqueeze(x, dim) for x in given], dim % (given[0].dim() + 1))
