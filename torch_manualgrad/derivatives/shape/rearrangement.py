"""Entries moved, repeated, or set to zero in a pattern: roll, flip, repeat, triangles, diagonals, shuffles, copied views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, bind, formula, linear_in, reached, real, rule

from .joining import split_backward, split_with_sizes_backward, unbind_backward
from .views import permute_backwards

__all__ = ["repeat_backward", "slice_backward_wrapper"]

# before, PyTorch's narrow_copy raised in reverse mode
_NARROW_COPY_HAS_DERIVATIVE = reached("2.13")


@formula
def repeat_backward(grad: Tensor, repeats: Sequence[int], input_shape: Sequence[int]) -> Tensor:
    """Cotangent of $x$, given that of ``x.repeat(repeats)``: the sum over the copies.

    Args:
        grad: cotangent of the result.
        repeats: how many copies there are along each dim of the result.
        input_shape: of $x$, which may have fewer dims.

    Returns:
        Of shape ``input_shape``.
    """
    if not repeats:
        return grad
    sizes = [1] * (len(repeats) - len(input_shape)) + list(input_shape)
    copies = grad.reshape([n for pair in zip(repeats, sizes) for n in pair])
    return copies.sum(list(range(0, copies.dim(), 2))).reshape(input_shape)


@formula
def slice_backward_wrapper(
    grad: Tensor, input_sizes: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> Tensor:
    """Cotangent of $x$, given that of a slice of it: zeros with the cotangent in that slice.

    Args:
        grad: cotangent of the slice.
        input_sizes: of $x$.
        dim, start, end, step: of the slice; None is the first index, or the one after the last.

    Returns:
        Of shape ``input_sizes``.
    """
    start = 0 if start is None else start
    end = input_sizes[dim] if end is None else end
    return torch.ops.aten.slice_backward(grad, input_sizes, dim, start, end, step)


def _narrow_vjp(grad: Tensor, self_sizes: Sequence[int], dim: int, start: int, length: int) -> Tensor:
    start = start + self_sizes[dim] if start < 0 else start  # else a slice that ends with the last entry would end at 0
    return slice_backward_wrapper(grad, self_sizes, dim, start, start + length, 1)


linear_in("aten::roll", {"self": lambda grad, shifts, dims: grad.roll([-n for n in shifts], dims)})
linear_in("aten::flip", {"self": lambda grad, dims: grad.flip(dims)})
linear_in("aten::rot90", {"self": lambda grad, k, dims: grad.rot90(-k, dims)})
linear_in("aten::tril", {"self": lambda grad, diagonal: grad.tril(diagonal)})
linear_in("aten::triu", {"self": lambda grad, diagonal: grad.triu(diagonal)})
linear_in("aten::diag_embed", {"self": lambda grad, offset, dim1, dim2: grad.diagonal(offset, dim1, dim2)})
linear_in("aten::repeat", {"self": repeat_backward.bind(input_shape="self_sizes")})
linear_in(
    "aten::channel_shuffle",
    {"self": lambda grad, groups: torch.channel_shuffle(grad, grad.shape[1] // groups) if grad.numel() else grad},
)
linear_in(
    "aten::pixel_shuffle",
    # PyTorch's inverse raises for an empty tensor, or keeps its sizes
    {
        "self": lambda grad, self_sizes, upscale_factor: (
            torch.pixel_unshuffle(grad, upscale_factor) if grad.numel() else grad.reshape(self_sizes)
        )
    },
)
linear_in(
    "aten::pixel_unshuffle",
    {
        "self": lambda grad, self_sizes, downscale_factor: (
            torch.pixel_shuffle(grad, downscale_factor) if grad.numel() else grad.reshape(self_sizes)
        )
    },
)
linear_in(
    "aten::narrow_copy",
    {"self": _narrow_vjp},
    improves="missing",
    defer_to_stock=lambda self, dim, start, length: _NARROW_COPY_HAS_DERIVATIVE and start >= 0,
)
linear_in("aten::_reshape_copy", {"self": lambda grad, self_sizes: grad.reshape(self_sizes)})
linear_in("aten::_unsafe_view", {"self": lambda grad, self_sizes: grad.reshape(self_sizes)})

# -- copies of views ---------------------------------------------------------------------------------------------------
#
# To PyTorch the tangent of such a copy may be a view of its argument's tangent, or that tangent itself. A write to the copy then
# changes the tangent of the argument too. These rules compute a tangent that shares no memory.

_aten = torch.ops.aten

_COTANGENTS: dict[str, Any] = {
    "alias_copy": lambda grad: grad,
    "view_copy": lambda grad, self_sizes: grad.reshape(self_sizes),
    "squeeze_copy": lambda grad, self_sizes: grad.reshape(self_sizes),
    "squeeze_copy.dim": lambda grad, self_sizes: grad.reshape(self_sizes),
    "squeeze_copy.dims": lambda grad, self_sizes: grad.reshape(self_sizes),
    "unsqueeze_copy": lambda grad, dim: grad.squeeze(dim),
    "expand_copy": lambda grad, self_sizes: grad.sum_to_size(self_sizes),
    "t_copy": lambda grad: grad.t(),
    "transpose_copy.int": lambda grad, dim0, dim1: grad.transpose(dim0, dim1),
    "permute_copy": permute_backwards.bind(fwd_dims="dims"),
    "select_copy.int": bind(_aten.select_backward.default, grad_output="grad", input_sizes="self_sizes"),
    "slice_copy.Tensor": slice_backward_wrapper.bind(input_sizes="self_sizes"),
    "diagonal_copy": bind(_aten.diagonal_backward.default, grad_output="grad", input_sizes="self_sizes"),
    "unfold_copy": bind(_aten.unfold_backward.default, grad_in="grad", input_sizes="self_sizes", dim="dimension"),
}

# which PyTorch differentiates only if they are real
_REAL_IN_PYTORCH = ("select_copy.int", "slice_copy.Tensor")

for _name, _vjp in _COTANGENTS.items():
    _refused = _name in _REAL_IN_PYTORCH
    linear_in(
        f"aten::{_name}",
        {"self": _vjp},
        improves=("missing", "values") if _refused else "values",
        defer_to_stock=real if _refused else always,
    )


# whose tangents alone may be batched, while PyTorch cannot batch the operators then
_PARTS: dict[str, Any] = {
    "unbind_copy.int": (
        unbind_backward.bind(grads="grad"),
        lambda self_t, dim: [t.clone() for t in self_t.unbind(dim)],
    ),
    "split_copy.Tensor": (
        split_backward.bind(grads="grad", sizes="self_sizes"),
        lambda self_t, split_size, dim: [t.clone() for t in self_t.split(split_size, dim)],
    ),
    "split_with_sizes_copy": (
        split_with_sizes_backward.bind(grads="grad", sizes="self_sizes"),
        lambda self_t, split_sizes, dim: [t.clone() for t in self_t.split_with_sizes(split_sizes, dim)],
    ),
}

_NOT_BATCHED = {"split_copy.Tensor"} if reached("2.13") else {"split_copy.Tensor", "unbind_copy.int"}
_GAPS = dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator")

for _name, (_vjp, _jvp) in _PARTS.items():
    rule(
        f"aten::{_name}",
        vjp={"self": _vjp},
        jvp={"result": _jvp},
        kind="linear",
        source="ATen derivatives.yaml",
        improves="values",
        defer_to_stock=always,
        gaps=_GAPS if _name in _NOT_BATCHED else None,
    )
