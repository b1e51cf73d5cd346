"""embedding: rows of a table. The row of padding_idx gets no gradient, by convention, though the result depends on it.

With scale_grad_by_freq the gradient of a row is divided by how often it is read, again by convention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, formula, linear_in

__all__ = ["embedding_dense_double_backward_symint"]


@formula
def embedding_dense_double_backward_symint(
    grad: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool = False
) -> Tensor:
    """Cotangent of the cotangent that the backward of embedding is given: rows of the cotangent, zero for padding.

    Args:
        grad: cotangent of the gradient of the table, (n, d).
        indices: (*), integers.
        padding_idx: the row without a gradient; negative for none.
        scale_grad_by_freq: whether the gradient of each row is divided by how often it is read.

    Returns:
        (*, d).

    References:
        ATen embedding_dense_double_backward_symint, which leaves the frequencies out.
    """
    flat = indices.reshape(-1)
    rows = grad.index_select(0, flat)
    if scale_grad_by_freq:
        frequencies = flat.new_zeros(grad.shape[0]).index_add(0, flat, torch.ones_like(flat))
        rows = rows / frequencies.index_select(0, flat)[:, None]
    if padding_idx >= 0:
        rows = rows.masked_fill((flat == padding_idx)[:, None], 0)
    return rows.reshape([*indices.shape, grad.shape[1]])


linear_in(
    "aten::embedding",
    {
        "weight": lambda grad, indices, padding_idx, scale_grad_by_freq, sparse, weight_sizes: (
            torch.ops.aten.embedding_backward(grad, indices, weight_sizes[0], padding_idx, scale_grad_by_freq, sparse)
        )
    },
)
linear_in(
    "aten::embedding_dense_backward",
    {"grad_output": embedding_dense_double_backward_symint},
    improves="values",
    defer_to_stock=ByMetadata(
        lambda grad_output, indices, num_weights, padding_idx, scale_grad_by_freq: not scale_grad_by_freq
    ),
)
