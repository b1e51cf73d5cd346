"""Entries moved, repeated, or set to zero in a pattern: roll, flip, repeat, triangles, diagonals, shuffles, copied views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in, reached

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
