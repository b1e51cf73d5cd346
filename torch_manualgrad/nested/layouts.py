"""Conversion of torch's nested tensors, strided and jagged, to buffers and back; reverse mode, to any order.

The jagged layout also has forward mode (dual numbers, not torch.func): its tangent is its buffer's tangent, which torch
itself ignores. The strided layout has no tangents, because torch refuses them. `Ragged` supports every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.engine.node import level_function
from ..core.internals import (
    JaggedStructure,
    below_autograd,
    dual_jagged,
    has_tangent,
    in_functorch,
    jagged_nested,
    jagged_of_duals,
    jagged_result,
    jagged_structure,
    jagged_view,
    nested_strides,
    strided_nested,
    tangents_possible,
)
from ..core.override.compiled_nested import differentiable_pieces, differentiates_views, expect_jagged_tangents
from ..core.override.replacements import stock
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
    "unused_positions",
    "used_positions",
]


# torch can view the buffer of a strided nested tensor in both directions without a copy. But if a cotangent arrives
# transposed, these views read its buffer in the original's order, and the gradient is silently in the wrong order.
# Splitting into components and stacking them are each other's adjoints, in whatever order the entries lie. So autograd
# tracks these two, unless a call stays with PyTorch (`strided`).


def tracked(x: Tensor) -> bool:
    """Whether operations on ``x`` are tracked by autograd."""
    return x.requires_grad and torch.is_grad_enabled()


def strided_components(nested: Tensor) -> tuple[Tensor, ...]:
    """The components of a strided nested tensor, transposed or not, as views; differentiable in reverse."""
    if not (tracked(nested) and differentiates_views()):
        with stock():
            return nested.unbind()
    with stock(), below_autograd():  # PyTorch's own node saves the tensor, which then must not be written to
        components = nested.unbind()
    count = len(components)
    return (*differentiable_pieces(nested, components, 0, range(count), [1] * count),)


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
    """Whether some of a buffer's positions belong to no component; False if the offsets cannot be read."""
    if structure.lengths is not None:
        return True
    offsets = structure.offsets
    return readable(offsets) and len(offsets) > 0 and (int(offsets[0]) != 0 or int(offsets[-1]) != positions)


def used_positions(structure: JaggedStructure) -> tuple[Tensor, Tensor]:
    """The positions of the buffer that belong to components, in order, and the offsets for a buffer of only these."""
    lengths = structure.offsets.diff() if structure.lengths is None else structure.lengths
    starts = structure.offsets[: len(lengths)]
    positions = strided_positions(lengths[:, None], torch.ones_like(lengths[:, None]), starts)
    return positions, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(structure.offsets.dtype)


def unused_positions(structure: JaggedStructure, positions: int) -> Tensor:
    """The positions of the buffer that belong to no component, in order, given the number of all positions."""
    unused = torch.ones(positions, dtype=torch.bool, device=structure.offsets.device)
    return unused.index_fill(0, used_positions(structure)[0], False).nonzero().squeeze(1)


def from_jagged(nested: Any) -> tuple[Tensor, Tensor, int]:
    """(values, offsets, ragged dim) of a jagged nested tensor; if it has holes, of a copy without them."""
    structure, values = jagged_structure(nested), jagged_values(nested, view=True)
    if not has_unused(structure, values.shape[structure.dim - 1]):
        return values, structure.offsets, structure.dim
    positions, offsets = used_positions(structure)
    return values.index_select(structure.dim - 1, positions), offsets, structure.dim


def jagged_values(nested: Any, *, view: bool = False) -> Tensor:
    """The buffer of a jagged nested tensor, with its holes if there are any; it shares memory with the tensor.

    Args:
        nested: the nested tensor.
        view: whether a caller may get the buffer or a tensor that shares its memory. The buffer is then PyTorch's view,
            so that autograd tracks writes to it. Its node saves ``nested``, which must not be written to before the
            backward.

    Returns:
        The buffer.
    """
    dual = dual_jagged(nested)
    if dual is not None:
        return dual
    differentiated = tracked(nested)
    if differentiated and (not view or nested.is_complex()):
        _refuse_transforms()
        return _unpack(nested)
    with stock():
        values: Tensor = nested.values()
    if differentiated:
        structure = jagged_structure(nested)
        _differentiate_again(values, lambda grad: to_jagged(grad, structure))
    return values


def to_jagged(values: Tensor, structure: JaggedStructure, *, view: bool = False) -> Any:
    """The jagged nested tensor with this buffer and the structure's own tensors; it shares memory with the buffer.

    Args:
        values: the buffer.
        structure: the structure of the result.
        view: whether a caller may get ``values`` or a tensor that shares their memory. The result is then a view of
            ``values``, so that autograd tracks writes to it.

    Returns:
        The nested tensor.
    """
    if tangents_possible([values]) and has_tangent(values):
        expect_jagged_tangents()
        return jagged_of_duals(values, structure)
    differentiated = tracked(values)
    if differentiated and (not view or values.is_complex()):
        _refuse_transforms()
        return _pack(values, structure, view)
    if not view:
        return jagged_nested(values, structure)
    with stock():
        nested = jagged_view(values, structure)
    if differentiated:
        _differentiate_again(nested, jagged_values)
    return nested


def _differentiate_again(view: Tensor, adjoint: Callable[[Any], Any]) -> None:
    """Make the backward of PyTorch's view, of a buffer or of a nested tensor, differentiable.

    Each of the two views is the other's adjoint. PyTorch's own backward of either view is right, but the derivative of
    that backward is wrong or missing.
    """

    def differentiable(gradients: Any, grads: Any) -> Any:
        if not torch.is_grad_enabled() or grads[0] is None or gradients[0] is None:
            return None
        return (adjoint(grads[0]), *gradients[1:])

    if view.grad_fn is None:  # a transform has hidden the history
        _refuse_transforms()
    assert view.grad_fn is not None
    view.grad_fn.register_hook(differentiable)


def _refuse_transforms() -> None:
    """Raise inside of a torch.func transform, whose levels an autograd function of one level cannot keep apart."""
    if in_functorch():
        raise RuntimeError(
            "a nested tensor of PyTorch has no derivative inside of a torch.func transform; pass a "
            "torch_manualgrad.nested.Ragged instead, which supports every mode"
        )


# Both conversions as autograd functions. They save no tensor, and support complex numbers, for which PyTorch has no
# tracked views. Autograd refuses in-place changes of tensors that share memory with their arguments.


def _unpacking() -> Callable[[Any], Tensor]:
    """The autograd function ``nested -> buffer``."""

    def forward(ctx: Any, nested: Any) -> Tensor:
        ctx.structure = jagged_structure(nested)
        with stock():
            values: Tensor = nested.detach().values()
        return values

    def backward(ctx: Any, grad: Tensor) -> Any:
        return to_jagged(grad, ctx.structure)

    apply: Callable[[Any], Tensor] = level_function("_Unpack", forward=forward, backward=backward).apply
    return apply


def _packing() -> Callable[[Tensor, JaggedStructure, bool], Any]:
    """The autograd function ``(buffer, structure, view) -> nested``."""

    def forward(ctx: Any, values: Tensor, structure: JaggedStructure, view: bool) -> Any:
        ctx.set_materialize_grads(False)  # nested tensors of zeros do not exist
        with stock():
            return jagged_view(values.detach(), structure) if view else jagged_result(values, structure)

    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None, None]:
        return None if grad is None else jagged_values(grad), None, None

    apply: Callable[[Tensor, JaggedStructure, bool], Any] = level_function(
        "_Pack", forward=forward, backward=backward
    ).apply
    return apply


_unpack, _pack = _unpacking(), _packing()
