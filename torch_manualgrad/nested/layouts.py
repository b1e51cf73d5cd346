"""torch's nested tensors, strided and jagged, to buffers and back: differentiable in reverse, to any order.

Forward mode (dual numbers, not torch.func), too, for the jagged layout: its tangent is that of its buffer, which torch
itself does not look at. The strided layout carries none: torch refuses. On `Ragged` every mode holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.families import stock
from ..core.internals import (
    dual_jagged,
    has_tangent,
    jagged_dim,
    jagged_nested,
    jagged_of_duals,
    nested_strides,
    strided_nested,
    tangents_possible,
)
from .packing import readable, row_strides, strided_places

__all__ = [
    "from_jagged",
    "from_strided",
    "jagged_values",
    "recorded",
    "strided_components",
    "to_jagged",
    "to_strided",
    "without_holes",
]


# Of a strided nested tensor torch can view the buffer both ways, at once; but where a cotangent arrives transposed, these
# views take its buffer for that of the original, and the gradient is in the wrong order without a word. Cutting it into
# its components, and making it of them, is each the other's adjoint, to any order; so that is what is recorded.


def recorded(x: Tensor) -> bool:
    """Whether autograd records what is done with ``x``."""
    return x.requires_grad and torch.is_grad_enabled()


def strided_components(nested: Tensor) -> tuple[Tensor, ...]:
    """The components of a strided nested tensor, a transposed one too: views, differentiable in reverse."""
    with stock():
        return nested.unbind()


def from_strided(nested: Tensor) -> tuple[Tensor, Tensor]:
    """(flat values, sizes (B, D) on the CPU) of a strided nested tensor, a transposed one too. Not differentiable."""
    sizes, strides, starts = nested_strides(nested)
    with stock():
        buffer, counts = nested.values(), sizes.prod(1)
    if torch.equal(strides, row_strides(sizes)) and torch.equal(starts, counts.cumsum(0) - counts):
        return buffer[: int(counts.sum())], sizes
    return buffer.index_select(0, strided_places(sizes, strides, starts).to(buffer.device)), sizes


def to_strided(flat: Tensor, sizes: Tensor) -> Tensor:
    """The strided nested tensor with flat values and sizes (B, D) on the CPU. Not differentiable; it may share memory."""
    counts, buffer = sizes.prod(1), flat.contiguous()
    if buffer.storage_offset():  # PyTorch's view begins where the storage does
        buffer = buffer.clone()
    return strided_nested(buffer, sizes, row_strides(sizes), counts.cumsum(0) - counts)


def from_jagged(nested: Any) -> tuple[Tensor, Tensor, int]:
    """(values, offsets, ragged dim) of a jagged nested tensor; holes between components are left out of a copy."""
    dim = jagged_dim(nested)
    values, offsets, lengths = jagged_values(nested), nested.offsets(), nested.lengths()
    if lengths is None and readable(offsets) and len(offsets):
        if int(offsets[0]) != 0 or int(offsets[-1]) != values.shape[dim - 1]:
            lengths = offsets.diff()
    if lengths is None:
        return values, offsets, dim
    return *without_holes(values, offsets, lengths, dim), dim


def without_holes(values: Tensor, offsets: Tensor, lengths: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(values, offsets) of a copy of a jagged buffer, of which only ``lengths`` places from each offset are used."""
    places = strided_places(lengths[:, None], torch.ones_like(lengths[:, None]), offsets[: len(lengths)])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(offsets.dtype)
    return values.index_select(dim - 1, places), offsets


def jagged_values(nested: Any) -> Tensor:
    """The buffer of a jagged nested tensor, with its holes if there are any; it shares its memory."""
    dual = dual_jagged(nested)
    return _Unpack.apply(nested) if dual is None else dual  # type: ignore[no-untyped-call]


def to_jagged(values: Tensor, offsets: Tensor, dim: int, known: tuple[int | None, int | None] = (None, None)) -> Any:
    """The jagged nested tensor with these values; it shares their memory and keeps the offsets themselves.

    ``known``: the shortest and the longest length, or None.
    """
    if tangents_possible([values]) and has_tangent(values):
        return jagged_of_duals(values, offsets, dim)
    return _Pack.apply(values, offsets, None, dim, known)  # type: ignore[no-untyped-call]


# torch's own views in both directions differentiate once; each is the other's adjoint, which holds to any order.


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nested: Any) -> Tensor:
        ctx.structure = nested.offsets(), nested.lengths(), jagged_dim(nested)
        with stock():
            return nested.values().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Pack.apply(grad, *ctx.structure, (None, None))  # type: ignore[no-untyped-call]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        offsets: Tensor,
        lengths: Tensor | None,
        dim: int,
        known: tuple[int | None, int | None],
    ) -> Any:
        with stock():
            return jagged_nested(values.detach(), offsets, lengths, dim, *known)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None, None, None]:
        return jagged_values(grad), None, None, None, None
