"""Indexing by a list of tensors of integers or booleans, of which some may be absent: x[i, :, j] and x[i, :, j] = y.

Where several values are put at one place without accumulation, one of them stays, PyTorch does not say which, and each gets
the cotangent. The unsafe twins, which the compiler makes, do not check their indices; the masked ones read and write only
where a mask is True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in, rule

from ..shape.common import samples

__all__ = ["index_backward"]

aten = torch.ops.aten


@formula
def index_backward(zeros_like_self: Tensor, indices: Sequence[Tensor | None], grad: Tensor) -> Tensor:
    """Cotangent of x, given that of x[indices]: the sum of the cotangents of the copies of each entry.

    Args:
        zeros_like_self: zeros, the shape of x.
        indices: a tensor of integers or booleans for each of the first dims of x, or None for all of a dim.
        grad: cotangent of the result.

    Returns:
        The shape of x.

    Note:
        Where not differentiable: nowhere; indexing is linear.

    References:
        ATen index_backward.
    """
    return aten.index_put(zeros_like_self, list(indices), grad, True)


def _put_vjp(put: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The cotangent of what is written to."""

    def vjp(grad: Tensor, indices: list[Any], accumulate: bool) -> Tensor:
        return grad if accumulate else put(grad, indices, grad.new_zeros(()), False)

    return vjp


# fmt: off
_INDEX = samples(
    lambda draw, index: (draw(3, 4), [index([0, 2, 0])]),
    lambda draw, index: (draw(2, 3, 2), [index([1, -1]), None, index([[0], [1]])]),
    lambda draw, index: (draw(3), [index(1)]),
)
_UNSAFE = samples(
    lambda draw, index: (draw(3, 4), [index([0, 2, 0])]),
    lambda draw, index: (draw(2, 3, 2), [index([1, 0]), None, index([[0], [1]])]),
)
_PUT = samples(
    lambda draw, index: (draw(3, 4), [index([0, 2])], draw(2, 4)),
    lambda draw, index: (draw(3, 4), [None, index([1, -1, 1])], draw(3, 1), True),
    lambda draw, index: (draw(3), [index(1)], draw()),
)
linear_in(
    "aten::index.Tensor",
    {"self": lambda grad, indices, self_sizes: index_backward(grad.new_zeros(self_sizes), indices, grad)},
    samples=_INDEX,
)
linear_in(
    "aten::_unsafe_index.Tensor",
    {"self": lambda grad, indices, self_sizes: aten._unsafe_index_put(grad.new_zeros(self_sizes), indices, grad, True)},
    samples=_UNSAFE,
)
linear_in(
    "aten::index_put",
    {
        "self": _put_vjp(aten.index_put),
        "values": lambda grad, indices, values_sizes: aten.index(grad, indices).sum_to_size(values_sizes),
    },
    samples=_PUT,
)
linear_in(
    "aten::_index_put_impl",
    {
        "self": _put_vjp(aten.index_put),
        "values": lambda grad, indices, values_sizes: aten.index(grad, indices).sum_to_size(values_sizes),
    },
    improves="values",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator"),
    samples=_PUT,
)
linear_in(
    "aten::_unsafe_index_put",
    {
        "self": _put_vjp(aten._unsafe_index_put),
        "values": lambda grad, indices, values_sizes: aten._unsafe_index(grad, indices).sum_to_size(values_sizes),
    },
    samples=samples(
        lambda draw, index: (draw(3, 4), [index([0, 2])], draw(2, 4)),
        lambda draw, index: (draw(3, 4), [None, index([1, 3, 1])], draw(3, 1), True),
    ),
)
rule(
    "aten::_unsafe_masked_index",
    vjp={"self": lambda grad, mask, indices, self_sizes:
         aten._unsafe_masked_index_put_accumulate(grad.new_zeros(self_sizes), mask, indices, grad)},
    jvp={"result": lambda self_t, mask, indices: aten._unsafe_masked_index(self_t, mask, indices, 0)},
    kind="linear",
    source="ATen derivatives.yaml",
    samples=samples(
        lambda draw, index: (draw(4), index([True, False, True]), [index([0, 9, 0])], 2.5),
        lambda draw, index: (draw(3, 4), index([[True], [False]]), [index([[2], [9]]), index([[0, 1, 1]])], 2.5),
    ),
)
linear_in(
    "aten::_unsafe_masked_index_put_accumulate",
    {
        "self": lambda grad: grad,
        "values": lambda grad, mask, indices, values_sizes:
            aten._unsafe_masked_index(grad, mask, indices, 0).sum_to_size(values_sizes),
    },
    samples=samples(
        lambda draw, index: (draw(4), index([True, False, True]), [index([0, 9, 0])], draw(3)),
        lambda draw, index: (draw(3, 4), index([[True], [False]]), [index([[2], [9]]), index([[0, 1, 1]])], draw(2, 3)),
    ),
)
# fmt: on
