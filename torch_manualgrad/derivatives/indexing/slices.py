"""Slices along a dim, by a tensor with one index for each: index_select, index_add, index_copy, index_fill.

Where several slices are copied to one place, one of them remains (PyTorch does not specify which), and each gets the cotangent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, linear_in, rule

from ..shape.common import of_dtype

__all__: list[str] = []


def _value_vjp(grad: Tensor, dim: int, index: Tensor, value_dtype: torch.dtype) -> Tensor:
    """The sum over the filled slices. A negative and a positive index may refer to the same one."""
    filled = torch.zeros_like(grad, dtype=torch.bool).index_fill(dim, index, True)
    return of_dtype(torch.where(filled, grad, 0).sum(), value_dtype)


linear_in(
    "aten::index_select",
    {"self": lambda grad, dim, index, self_sizes: grad.new_zeros(self_sizes).index_add(dim, index, grad)},
)
linear_in(
    "aten::index_add",
    {
        "self": lambda grad: grad,
        "source": lambda grad, dim, index, alpha, source_sizes: (
            grad.index_select(dim, index).reshape(source_sizes) * alpha.conjugate()
        ),
    },
)
linear_in(
    "aten::index_copy",
    {
        "self": lambda grad, dim, index: grad.index_fill(dim, index, 0),
        "source": lambda grad, dim, index, source_sizes: grad.index_select(dim, index).reshape(source_sizes),
    },
)
rule(
    "aten::index_fill.int_Scalar",
    vjp={"self": lambda grad, dim, index: grad.index_fill(dim, index, 0)},
    jvp={"result": lambda self_t, dim, index: self_t.index_fill(dim, index, 0)},
    kind="linear",
    source="ATen derivatives.yaml",
)
linear_in(
    "aten::index_fill.int_Tensor",
    {"self": lambda grad, dim, index: grad.index_fill(dim, index, 0), "value": _value_vjp},
    improves="missing",
    defer_to_stock=ByMetadata(lambda self, dim, index, value: not value.requires_grad),
)
