"""Indexing by a list of tensors of integers or booleans, or None: ``x[i, :, j]`` and ``x[i, :, j] = y``.

Where several values are put at one place without accumulation, one of them remains (PyTorch does not specify which), and each
gets the cotangent. The unsafe variants, which the compiler creates, do not check their indices; the masked variants read and
write only where a mask is True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import bind, formula, linear_in, rule

__all__ = ["index_backward"]

aten = torch.ops.aten


@formula
def index_backward(zeros_like_self: Tensor, indices: Sequence[Tensor | None], grad: Tensor) -> Tensor:
    """Cotangent of $x$, given that of ``x[indices]``: the sum of the cotangents of the copies of each entry.

    Args:
        zeros_like_self: zeros, the shape of $x$.
        indices: a tensor of integers or booleans for each of the first dims of $x$, or None for all of a dim.
        grad: cotangent of the result.

    Returns:
        The shape of $x$.
    """
    return aten.index_put(zeros_like_self, list(indices), grad, True)


def _put_vjp(put: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The cotangent of the tensor that is written to."""

    def vjp(grad: Tensor, indices: list[Any], accumulate: bool) -> Tensor:
        return grad if accumulate else put(grad, indices, grad.new_zeros(()), False)

    return vjp


linear_in(
    "aten::index.Tensor",
    {"self": lambda grad, indices, self_sizes: index_backward(grad.new_zeros(self_sizes), indices, grad)},
)
linear_in(
    "aten::_unsafe_index.Tensor",
    {"self": lambda grad, indices, self_sizes: aten._unsafe_index_put(grad.new_zeros(self_sizes), indices, grad, True)},
)
linear_in(
    "aten::index_put",
    {
        "self": _put_vjp(aten.index_put),
        "values": lambda grad, indices, values_sizes: aten.index(grad, indices).sum_to_size(values_sizes),
    },
)
linear_in(
    "aten::_index_put_impl",
    {
        "self": _put_vjp(aten.index_put),
        "values": lambda grad, indices, values_sizes: aten.index(grad, indices).sum_to_size(values_sizes),
    },
    improves="values",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator"),
)
linear_in(
    "aten::_unsafe_index_put",
    {
        "self": _put_vjp(aten._unsafe_index_put),
        "values": lambda grad, indices, values_sizes: aten._unsafe_index(grad, indices).sum_to_size(values_sizes),
    },
)
rule(
    "aten::_unsafe_masked_index",
    vjp={
        "self": lambda grad, mask, indices, self_sizes: aten._unsafe_masked_index_put_accumulate(
            grad.new_zeros(self_sizes), mask, indices, grad
        )
    },
    jvp={"result": bind(aten._unsafe_masked_index.default, self="self_t", fill=0)},
    kind="linear",
    source="ATen derivatives.yaml",
)
linear_in(
    "aten::_unsafe_masked_index_put_accumulate",
    {
        "self": lambda grad: grad,
        "values": lambda grad, mask, indices, values_sizes: aten._unsafe_masked_index(
            grad, mask, indices, 0
        ).sum_to_size(values_sizes),
    },
)
