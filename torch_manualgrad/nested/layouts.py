"""Conversion of torch's nested tensors, strided and jagged, to buffers and back; reverse mode, in any order.

The jagged layout has forward mode too (dual numbers, not torch.func): its tangent is that of its buffer, which torch
itself ignores. The strided layout has no tangents, as torch refuses them. `Ragged` supports every mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.internals import (
    JaggedStructure,
    dual_jagged,
    has_tangent,
    jagged_nested,
    jagged_of_duals,
    jagged_result,
    jagged_structure,
    nested_strides,
    strided_nested,
    tangents_possible,
)
from ..core.nested_calls import expect_jagged_tangents
from ..core.replacements import stock
from .packing import readable, row_strides, strided_positions

__all__ = [
    "from_jagged",
    "from_strided",
    "has_unused",
    "jagged_values",
    "strided_components",
    "to_jagged",
    "to_strided",
    "tracked",
    "used_positions",
]


# torch can view the buffer of a strided nested tensor in both directions without a copy. But if a cotangent arrives
# transposed, these views read its buffer in the original's order, and the gradient is silently in the wrong order.
# Splitting into components and stacking them are adjoint to each other, in any order; so autograd tracks these, where a
# call does not stay with PyTorch (`strided`).


def tracked(x: Tensor) -> bool:
    """Whether operations on ``x`` are tracked by autograd."""
    return x.requires_grad and torch.is_grad_enabled()


def strided_components(nested: Tensor) -> tuple[Tensor, ...]:
    """The components of a strided nested tensor, also of a transposed one: views, differentiable in reverse."""
    with stock():
        return nested.unbind()


def from_strided(nested: Tensor) -> tuple[Tensor, Tensor]:
    """(flat values, sizes (B, D) on the CPU) of a strided nested tensor, or a transposed one. Not differentiable."""
    sizes, strides, starts = nested_strides(nested)
    with stock():
        buffer, counts = nested.values(), sizes.prod(1)
    if torch.equal(strides, row_strides(sizes)) and torch.equal(starts, counts.cumsum(0) - counts):
        return buffer[: int(counts.sum())], sizes
    return buffer.index_select(0, strided_positions(sizes, strides, starts).to(buffer.device)), sizes


def to_strided(flat: Tensor, sizes: Tensor) -> Tensor:
    """The strided nested tensor with flat values and sizes (B, D) on the CPU. Not differentiable; may share memory."""
    counts, buffer = sizes.prod(1), flat.contiguous()
    if buffer.storage_offset():  # PyTorch's view begins at the start of the storage
        buffer = buffer.clone()
    return strided_nested(buffer, sizes, row_strides(sizes), counts.cumsum(0) - counts)


def has_unused(structure: JaggedStructure, positions: int) -> bool:
    """Whether a buffer of so many positions has some that belong to no component; False where that cannot be read."""
    if structure.lengths is not None:
        return True
    offsets = structure.offsets
    return readable(offsets) and len(offsets) > 0 and (int(offsets[0]) != 0 or int(offsets[-1]) != positions)


def used_positions(structure: JaggedStructure) -> tuple[Tensor, Tensor]:
    """The positions of the buffer that belong to components, in order, and the offsets of a buffer of only these."""
    lengths = structure.offsets.diff() if structure.lengths is None else structure.lengths
    starts = structure.offsets[: len(lengths)]
    positions = strided_positions(lengths[:, None], torch.ones_like(lengths[:, None]), starts)
    return positions, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(structure.offsets.dtype)


def from_jagged(nested: Any) -> tuple[Tensor, Tensor, int]:
    """(values, offsets, ragged dim) of a jagged nested tensor; holes between components are left out of a copy."""
    structure, values = jagged_structure(nested), jagged_values(nested)
    if not has_unused(structure, values.shape[structure.dim - 1]):
        return values, structure.offsets, structure.dim
    positions, offsets = used_positions(structure)
    return values.index_select(structure.dim - 1, positions), offsets, structure.dim


def jagged_values(nested: Any) -> Tensor:
    """The buffer of a jagged nested tensor, with its holes if there are any; it shares memory with the tensor."""
    dual = dual_jagged(nested)
    if dual is not None:
        return dual
    if tracked(nested):
        return _Unpack.apply(nested)  # type: ignore[no-untyped-call]
    with stock():
        values: Tensor = nested.values()
    return values


def to_jagged(values: Tensor, structure: JaggedStructure) -> Any:
    """The jagged nested tensor with this buffer and the structure's own tensors; it shares memory with the buffer."""
    if tangents_possible([values]) and has_tangent(values):
        expect_jagged_tangents()
        return jagged_of_duals(values, structure)
    if tracked(values):
        return _Pack.apply(values, structure)  # type: ignore[no-untyped-call]
    return jagged_nested(values, structure)


# torch's own views in both directions differentiate once. Each is the adjoint of the other, which gives any order. What
# shares memory with a nested tensor remains a view of it, so that autograd refuses a change in place, which the nested
# tensor would not see.


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nested: Any) -> Tensor:
        ctx.structure = jagged_structure(nested)
        with stock():  # PyTorch refuses a view of a complex tensor that has a history
            values: Tensor = (nested.detach() if nested.is_complex() else nested).values()
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return to_jagged(grad, ctx.structure)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, structure: JaggedStructure) -> Any:
        with stock():
            return jagged_result(values, structure)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None]:
        return jagged_values(grad), None
