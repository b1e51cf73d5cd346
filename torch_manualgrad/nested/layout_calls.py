"""PyTorch's operators on the structure and the layout of its nested tensors, with PyTorch's parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import (
    JaggedStructure,
    below_autograd,
    dual_jagged,
    jagged_dim,
    jagged_structure,
    known_lengths,
    longest_known,
    nested_strides,
    strided_nested,
)
from ..core.override.compiled_nested import differentiable_pieces, differentiates_views
from ..core.override.replacements import stock
from . import selection, structure
from .choice import REFUSALS
from .conversion import on_nested
from .layouts import jagged_values, to_jagged, tracked, used_positions
from .packing import readable
from .ragged import Ragged
from .strided import CALLS

__all__ = [
    "as_strided",
    "chunk",
    "clone",
    "contiguous",
    "narrow",
    "reshape",
    "select",
    "split_with_sizes",
    "to_padded",
    "transpose",
    "unbind",
    "values",
    "view_from_jagged",
]


def unbind(self: Any, dim: int = 0) -> Any:
    if self.layout is torch.strided and dim in (0, -self.dim()):
        return NotImplemented  # PyTorch's own is right here, and returns views
    return structure.unbind(self, dim)


def select(self: Any, dim: int, index: int) -> Any:
    if self.layout is torch.jagged:
        return selection.select(self, dim, index)
    if dim not in (0, -self.dim()):
        return (
            as_strided(self, selection.select(self, dim, index)) if tracked(self) else _strided_view(self, dim, index)
        )
    count = self.size(0)
    if not -count <= index < count:
        raise IndexError(f"index: {index} is out of range for {count} components")
    with stock():  # PyTorch's backward ends the process for a negative index
        component = self.select(0, index % count)
    return CALLS.mark("aten::select.int", component)


def chunk(self: Any, chunks: int, dim: int = 0) -> Any:
    return _pieces(self, dim, lambda: self.chunk(chunks, dim), lambda: structure.chunk(self, chunks, dim))


def split_with_sizes(self: Any, split_sizes: Sequence[int], dim: int = 0) -> Any:
    return _pieces(
        self,
        dim,
        lambda: self.split_with_sizes(split_sizes, dim),
        lambda: structure.split_with_sizes(self, split_sizes, dim),
    )


def narrow(self: Any, dim: int, start: int, length: int) -> Any:
    if self.layout is torch.strided and tracked(self) and differentiates_views() and dim in (0, -self.dim()):
        with stock(), below_autograd():
            view = self.narrow(0, start, length)
        return differentiable_pieces(self, [view], 0, [start % max(self.size(0), 1)], [length])[0]
    return selection.narrow(self, dim, start, length)


def _pieces(self: Any, dim: int, views: Callable[[], Sequence[Any]], pieces: Callable[[], Any]) -> Any:
    """Pieces along ``dim``: for a tracked strided tensor PyTorch's views, if they can be differentiated; else ours."""
    if self.layout is torch.jagged or not (tracked(self) and differentiates_views()):
        return pieces()
    try:
        with stock(), below_autograd():
            found = views()
    except REFUSALS:
        return pieces()
    at = dim % self.dim()
    lengths = [int(view._nested_tensor_size()[0, at - 1]) for view in found]
    return differentiable_pieces(self, found, at, [0, *itertools.accumulate(lengths)][:-1], lengths)


def _strided_view(nested: Tensor, dim: int, index: int) -> Tensor:
    """The entries at ``index`` along ``dim`` of every component, as a view. Raises: IndexError: out of range."""
    if not -nested.dim() <= dim < nested.dim():
        raise IndexError(f"dim: {dim} is out of range for a nested tensor of {nested.dim()} dims")
    sizes, strides, starts = nested_strides(nested)
    at = dim % nested.dim() - 1
    for b, n in enumerate(sizes[:, at].tolist()):
        if not -n <= index < n:
            raise IndexError(f"index: {index} is out of range for component {b}, whose size in dim {dim} is {n}")
    starts = starts + (sizes[:, at] + index if index < 0 else index) * strides[:, at]
    kept = [d for d in range(sizes.shape[1]) if d != at]
    with stock():
        return strided_nested(nested.values(), sizes[:, kept].contiguous(), strides[:, kept].contiguous(), starts)


def as_strided(self: Any, found: Any) -> Any:
    """Make a dense result (B, ...) of a strided tensor a nested tensor of its rows, which PyTorch's strided class returns."""
    if self.layout is torch.strided and not found.is_nested:
        return torch.nested.as_nested_tensor(list(found.unbind()))
    return found


def transpose(self: Any, dim0: int, dim1: int) -> Any:
    """Transpose a jagged tensor with a tangent; for others PyTorch's is right, and returns a view."""
    dual = self.layout is torch.jagged and dual_jagged(self) is not None
    return structure.transpose(self, dim0, dim1) if dual else NotImplemented


def contiguous(self: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
    """PyTorch's is right for jagged tensors without holes."""
    if self.layout is torch.jagged:
        return _without_holes(self) if jagged_structure(self).lengths is not None else NotImplemented
    return NotImplemented if self.is_contiguous() else Ragged.from_nested(self).to_nested(torch.strided)


def clone(self: Any, *, memory_format: Any = None) -> Any:
    """PyTorch's is right if the copy has the layout of the original."""
    if memory_format is not torch.contiguous_format or self.layout is not torch.jagged:
        return NotImplemented
    return contiguous(self)


def _without_holes(nested: Any) -> Any:
    """A copy without holes. The gradient of PyTorch's own copy has a different ragged size than ``nested``."""
    structure = jagged_structure(nested)
    positions, offsets = used_positions(structure)
    values = jagged_values(nested).index_select(structure.dim - 1, positions)
    known, lengths = structure.known, offsets.diff()
    if not known and len(lengths) and readable(lengths):  # PyTorch's copy knows them
        known = known_lengths(*[lengths.new_empty(int(n), 0) for n in (lengths.min(), lengths.max())])
    return to_jagged(values, structure._replace(offsets=offsets, lengths=None, known=known))


def reshape(self: Any, size: Sequence[Any]) -> Any:
    """Reshape the dense dims of a jagged tensor with a tangent; for others PyTorch's is right, and returns views."""
    values = dual_jagged(self)
    symbolic = [d for d, n in enumerate(size) if not isinstance(n, int)]  # the ragged size is not a number
    if values is None or len(symbolic) != 1:
        return NotImplemented
    (ragged,), now = symbolic, jagged_dim(self)
    if ragged == 0 or math.prod(size[1:ragged]) != math.prod(values.shape[: now - 1]):
        return NotImplemented
    shape = [*size[1:ragged], values.shape[now - 1], *size[ragged + 1 :]]
    return to_jagged(values.reshape(shape), jagged_structure(self)._replace(dim=ragged))


def values(self: Any) -> Any:
    """PyTorch's own is right for strided tensors, and returns a view."""
    if self.layout is torch.jagged:
        return jagged_values(self, view=True)
    with stock():
        buffer = self.values()
    return CALLS.mark("aten::values", buffer)


def view_from_jagged(
    self: Tensor,
    offsets: Tensor,
    dummy: Tensor,
    lengths: Tensor | None = None,
    ragged_idx: int = 1,
    min_seqlen: Tensor | None = None,
    max_seqlen: Tensor | None = None,
) -> Any:
    known = known_lengths(min_seqlen, max_seqlen)
    return to_jagged(self, JaggedStructure(offsets, lengths, ragged_idx, known), view=True)


def to_padded(self: Any, padding: float, output_size: Sequence[int] | None = None) -> Any:
    """Pad a nested tensor.

    As in PyTorch's jagged class, only the size of the ragged dim in ``output_size`` is read, and if no longest length is
    known, the result is padded to the length of the buffer.
    """
    if self.layout is torch.strided:
        return structure.to_padded_tensor(self, padding, output_size)
    at = jagged_structure(self)
    if at.lengths is not None and output_size is None:
        return structure.to_padded_tensor(self, padding)
    return _padded(self, padding, longest_known(at) if output_size is None else output_size[at.dim])


@on_nested
def _padded(x: Ragged, padding: float, length: int | None) -> Tensor:
    return x.to_padded(padding, x.values.shape[x.packed_dim] if length is None else length)
