"""PyTorch's operators on the structure and the layout of its nested tensors, with the parameters that they have there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import (
    JaggedStructure,
    dual_jagged,
    jagged_dim,
    jagged_structure,
    known_lengths,
    longest_known,
    nested_strides,
    strided_nested,
)
from ..core.replacements import stock
from . import selection, structure
from .conversion import on_nested
from .layouts import jagged_values, to_jagged, tracked
from .ragged import Ragged

__all__ = [
    "as_strided",
    "contiguous",
    "reshape",
    "select",
    "to_padded",
    "transpose",
    "unbind",
    "values",
    "view_from_jagged",
]


def unbind(self: Any, dim: int = 0) -> Any:
    if self.layout is torch.strided and dim in (0, -self.dim()):
        return NotImplemented  # PyTorch's own is right there, and gives views
    return structure.unbind(self, dim)


def select(self: Any, dim: int, index: int) -> Any:
    if self.layout is torch.jagged:
        return selection.select(self, dim, index)
    if dim not in (0, -self.dim()):
        return (
            as_strided(self, selection.select(self, dim, index)) if tracked(self) else _strided_view(self, dim, index)
        )
    components = self.unbind()
    if not -len(components) <= index < len(components):
        raise IndexError(f"index: {index} is out of range for {len(components)} components")
    return components[index]


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
    """Make nested what PyTorch's strided class keeps nested: the entries of a tensor (B, ...) as components."""
    if self.layout is torch.strided and not found.is_nested:
        return torch.nested.as_nested_tensor(list(found.unbind()))
    return found


def transpose(self: Any, dim0: int, dim1: int) -> Any:
    """PyTorch's own is right, and gives a view; but it has no tangents."""
    dual = self.layout is torch.jagged and dual_jagged(self) is not None
    return structure.transpose(self, dim0, dim1) if dual else NotImplemented


def contiguous(self: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
    if self.layout is torch.jagged or self.is_contiguous():
        return NotImplemented
    return Ragged.from_nested(self).to_nested(torch.strided)


def reshape(self: Any, size: Sequence[Any]) -> Any:
    """Reshape the dense dims of a jagged tensor with a tangent; for others PyTorch's is right, and returns views."""
    values = dual_jagged(self)
    symbolic = [d for d, n in enumerate(size) if not isinstance(n, int)]  # the ragged size is no number
    if values is None or len(symbolic) != 1:
        return NotImplemented
    (ragged,), now = symbolic, jagged_dim(self)
    if ragged == 0 or math.prod(size[1:ragged]) != math.prod(values.shape[: now - 1]):
        return NotImplemented
    shape = [*size[1:ragged], values.shape[now - 1], *size[ragged + 1 :]]
    return to_jagged(values.reshape(shape), jagged_structure(self)._replace(dim=ragged))


class _View(torch.autograd.Function):
    """The tensor itself. Autograd refuses to change it in place: the change would not reach the tensor it came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def values(self: Any) -> Any:
    if self.layout is torch.jagged:
        return jagged_values(self, view=True)
    if not self.is_contiguous():
        return NotImplemented
    return _View.apply(Ragged.from_nested(self).flat())  # type: ignore[no-untyped-call]


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

    Of ``output_size``, PyTorch's jagged class reads only the size of the ragged dim, and where no longest length is
    known it pads to the length of the buffer.
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
