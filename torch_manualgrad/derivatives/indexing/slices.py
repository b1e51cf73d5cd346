"""Slices along a dim, by a tensor with one index for each: index_select, index_add, index_copy, index_fill.

Where several slices are copied to one place, one of them stays, PyTorch does not say which, and each gets the cotangent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import linear_in, rule

from ..shape.common import of_dtype, samples

__all__: list[str] = []


def _value_vjp(grad: Tensor, dim: int, index: Tensor, value_dtype: torch.dtype) -> Tensor:
    """The sum over what is filled, which a negative and a positive index may name twice."""
    filled = torch.zeros_like(grad, dtype=torch.bool).index_fill(dim, index, True)
    return of_dtype(torch.where(filled, grad, 0).sum(), value_dtype)


# fmt: off
linear_in(
    "aten::index_select",
    {"self": lambda grad, dim, index, self_sizes: grad.new_zeros(self_sizes).index_add(dim, index, grad)},
    samples=samples(
        lambda draw, index: (draw(3, 4), 0, index([0, 2, 0])),
        lambda draw, index: (draw(2, 3), -1, index([1])),
        lambda draw, index: (draw(), 0, index([0])),
        lambda draw, index: (draw(2, 3), 1, index([])),
    ),
)
linear_in(
    "aten::index_add",
    {
        "self": lambda grad: grad,
        "source": lambda grad, dim, index, alpha, source_sizes:
            grad.index_select(dim, index).reshape(source_sizes) * alpha.conjugate(),
    },
    samples=samples(
        lambda draw, index: (draw(3, 4), 0, index([0, 2, 0]), draw(3, 4)),
        lambda draw, index: (draw(2, 3), -1, index([1]), draw(2, 1), {"alpha": -3}),
        lambda draw, index: (draw(), 0, index([0]), draw()),
        lambda draw, index: (draw(2, 3), 1, index([]), draw(2, 0)),
    ),
)
linear_in(
    "aten::index_copy",
    {
        "self": lambda grad, dim, index: grad.index_fill(dim, index, 0),
        "source": lambda grad, dim, index, source_sizes: grad.index_select(dim, index).reshape(source_sizes),
    },
    samples=samples(
        lambda draw, index: (draw(3, 4), 0, index([0, 2]), draw(2, 4)),
        lambda draw, index: (draw(2, 3), -1, index([1]), draw(2, 1)),
        lambda draw, index: (draw(), 0, index([0]), draw()),
    ),
)
rule(
    "aten::index_fill.int_Scalar",
    vjp={"self": lambda grad, dim, index: grad.index_fill(dim, index, 0)},
    jvp={"result": lambda self_t, dim, index: self_t.index_fill(dim, index, 0)},
    kind="linear",
    source="ATen derivatives.yaml",
    samples=samples(
        lambda draw, index: (draw(3, 4), 1, index([0, -1]), 2.5),
        lambda draw, index: (draw(), 0, index([0]), 2.5),
    ),
)
linear_in(
    "aten::index_fill.int_Tensor",
    {"self": lambda grad, dim, index: grad.index_fill(dim, index, 0), "value": _value_vjp},
    improves="missing",
    defer_to_stock=lambda self, dim, index, value: not value.requires_grad,
    probe=lambda self, dim, index, value: torch.index_fill(self + 0 * value, dim, index, value),  # PyTorch's vmap over the value alone is wrong
    samples=samples(
        lambda draw, index: (draw(3, 4), 1, index([0, -1, 3]), draw()),
        lambda draw, index: (draw(3, 2), 0, index(1), draw()),
        lambda draw, index: (draw(3, 2), 0, index([]), draw()),
    ),
)
# fmt: on
