"""PyTorch's backward operators on its nested tensors, with derivatives.

The nodes of PyTorch's graphs call these operators; see `strided`. Each function takes the parameters of PyTorch's operator of
the same name. A cotangent may have any memory layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import jagged_structure
from .activations import gelu_backwards_nested, silu_backward_nested, threshold_backwards_nested
from .conversion import on_nested, require_same_structure
from .layer_normalization import layer_norm_backward_nested
from .layouts import jagged_values, to_jagged
from .lines import Lines
from .matmul import nested_linear_backward
from .normalization import last_dims
from .packing import packed_from_flat
from .ragged import Ragged
from .segments import nested_softmax_backward, wide
from .slices import one_dim

__all__ = ["BACKWARD"]


@on_nested
def _gelu_backward(grad_output: Ragged, self: Ragged, *, approximate: str = "none") -> Ragged:
    require_same_structure(self, grad_output)
    return self.like(gelu_backwards_nested(grad_output.values, self.values, approximate))


@on_nested
def _silu_backward(grad_output: Ragged, self: Ragged) -> Ragged:
    require_same_structure(self, grad_output)
    return self.like(silu_backward_nested(grad_output.values, self.values))


@on_nested
def _sigmoid(self: Ragged) -> Ragged:
    """The operator that PyTorch's node of silu calls if autograd tracks its backward."""
    return self.like(self.values.sigmoid())


@on_nested
def _neg(self: Ragged) -> Ragged:
    """The operators that PyTorch's nodes of differences and quotients call."""
    return self.like(-self.values)


@on_nested
def _threshold_backward(grad_output: Ragged, self: Ragged, threshold: float) -> Ragged:
    require_same_structure(self, grad_output)
    return self.like(threshold_backwards_nested(grad_output.values, self.values, threshold))


@on_nested
def _softmax_backward_data(grad_output: Ragged, output: Ragged, dim: int, input_dtype: torch.dtype) -> Ragged:
    require_same_structure(output, grad_output)
    dim = one_dim(output, dim)
    g, y = grad_output.values, output.values
    if output.sizes is not None:
        lines, of_grad = Lines(output, dim), Lines(grad_output, dim)
        found = nested_softmax_backward(of_grad.values, lines.values, lines.offsets(), 0).index_select(0, lines.back)
    elif dim - 1 == output.packed_dim:
        found = nested_softmax_backward(g, y, output.offsets, dim - 1)
    else:
        found = y * (g - (y * g).sum(dim - 1, keepdim=True))
    return output.like(found.to(input_dtype))


@on_nested
def _nested_sum_backward(grad: Ragged, self: Ragged, dim: Any, keepdim: bool = False) -> Ragged:
    parts = [g.expand(x.shape) for g, x in zip(grad.components(), self.components())]
    return Ragged.from_components(parts, ragged_dims=self.ragged_dims)


@on_nested
def _linear_backward(self: Ragged, grad_output: Ragged, weight: Tensor, output_mask: Sequence[bool]) -> Any:
    if output_mask[1] or output_mask[2]:
        _ = self.offsets  # raises for a buffer with holes; the call is then repeated without them, for the sums
    rows, g = self.values, grad_output.values
    if self.sizes is not None:
        rows, g = rows.reshape(-1, weight.shape[1]), g.reshape(-1, weight.shape[0])
    found, *parameters = nested_linear_backward(rows, g, weight, output_mask)
    return (
        self.like(found.reshape(self.values.shape)) if output_mask[0] else None,
        *_wanted(parameters, output_mask[1:]),
    )


@on_nested
def _native_layer_norm_backward(
    grad_out: Ragged,
    input: Ragged,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """The backward with mean and rstd as functions of the input: PyTorch's graph treats them as constants.

    As eps is unknown, rstd keeps its given value.
    """
    require_same_structure(input, grad_out)
    shape, dims = list(normalized_shape), last_dims(normalized_shape)
    x, g = (r.flat().reshape(-1, *shape) for r in (input, grad_out))
    m = wide(x).mean(dims, keepdim=True)
    variance = (wide(x) - m).square().mean(dims, keepdim=True)
    r = (variance - variance.detach() + wide(rstd).detach().reshape(variance.shape).pow(-2)).rsqrt()
    found, *parameters = layer_norm_backward_nested(g, x, shape, m, r, weight, output_mask)
    return (_from_flat(found.reshape(-1), input) if output_mask[0] else None, *_wanted(parameters, output_mask[1:]))


def _from_flat(flat: Tensor, like: Ragged) -> Ragged:
    """The batch with the structure of ``like``, given its flat buffer."""
    if like.sizes is not None:
        return like.like(flat)
    return like.like(packed_from_flat(flat, like.offsets, like.values.shape, like.packed_dim))


def _wanted(gradients: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    return [g if wanted else None for g, wanted in zip(gradients, mask)]


@on_nested
def _select_of_batch_backward(grad_output: Tensor, self: Ragged, index: int) -> Ragged:
    parts = [grad_output if b == index else torch.zeros_like(x) for b, x in enumerate(self.components())]
    return Ragged.from_components(parts, ragged_dims=self.ragged_dims)


def _nested_select_backward(grad_output: Tensor, self: Any, dim: int, index: int) -> Any:
    """The backward of a strided select along the batch. Jagged tensors use our select; other strided dims have no backward."""
    if self.layout is torch.jagged or dim not in (0, -self.dim()):
        return NotImplemented
    return _select_of_batch_backward(grad_output, self, index % self.size(0))


def _new_empty_strided(
    self: Any, size: Sequence[Any], stride: Sequence[Any], *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    """A jagged tensor like this one: for the backward of a write to a view."""
    if self.layout is not torch.jagged or tuple(size) != tuple(self.shape):
        return NotImplemented
    return to_jagged(torch.empty_like(jagged_values(self), dtype=dtype, device=device), jagged_structure(self))


BACKWARD: dict[str, Callable[..., Any]] = {
    "new_empty_strided": _new_empty_strided,
    "gelu_backward": _gelu_backward,
    "silu_backward": _silu_backward,
    "sigmoid": _sigmoid,
    "neg": _neg,
    "threshold_backward": _threshold_backward,
    "_softmax_backward_data": _softmax_backward_data,
    "_nested_sum_backward": _nested_sum_backward,
    "_nested_select_backward": _nested_select_backward,
    "linear_backward": _linear_backward,
    "native_layer_norm_backward": _native_layer_norm_backward,
}
