"""Entries that a mask selects: masked_select, masked_scatter and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, formula, linear_in

__all__ = ["masked_scatter_backward"]


@formula
def masked_scatter_backward(grad_output: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Cotangent of the source, given that of ``x.masked_scatter(mask, source)``: the entries under the mask, in order.

    Args:
        grad_output: cotangent of the result.
        mask: boolean, broadcasts with ``grad_output``.
        sizes: the sizes of the source. As many of its entries are read as the mask has True.

    Returns:
        Of shape ``sizes``.

    References:
        ATen masked_scatter_backward_symint; here places are counted, so that no shape depends on the mask.
    """
    shape = torch.broadcast_shapes(grad_output.shape, mask.shape)
    grad, mask = grad_output.expand(shape).reshape(-1), mask.expand(shape).reshape(-1)
    n = prod(sizes)
    places = torch.where(mask, mask.cumsum(0) - 1, n)  # entries that are not read go to one extra place
    return grad.new_zeros(n + 1).index_add(0, places, grad).narrow(0, 0, n).reshape(sizes)


linear_in(
    "aten::masked_select",
    {
        "self": lambda grad, mask, self_sizes: (
            grad.new_zeros(torch.broadcast_shapes(self_sizes, mask.shape))
            .masked_scatter(mask, grad)
            .sum_to_size(self_sizes)
        )
    },
    gaps={
        "fake": "the shape of the result depends on the mask",
        "vmap/over args[1]": "the shapes of the results are those of masks",
        "vmap/over all": "the shapes of the results are those of masks",
    },
)
linear_in(
    "aten::masked_scatter",
    {
        "self": lambda grad, mask, self_sizes: grad.masked_fill(mask, 0).sum_to_size(self_sizes),
        "source": masked_scatter_backward.bind(grad_output="grad", sizes="source_sizes"),
    },
)
linear_in(
    "aten::masked_scatter_backward",
    {
        "grad_output": lambda grad, mask, grad_output_sizes: (
            grad.new_zeros(grad_output_sizes).masked_scatter(mask, grad).sum_to_size(grad_output_sizes)
        )
    },
    improves="missing",
    defer_to_stock=always,
)
