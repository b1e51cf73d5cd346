"""What a mask selects: masked_select, masked_scatter and its backward."""

from __future__ import annotations

import torch

from torch_manualgrad.core.linear import linear_in

from .common import samples

__all__: list[str] = []

# fmt: off
linear_in(
    "aten::masked_select",
    {
        "self": lambda grad, mask, self_sizes: grad.new_zeros(torch.broadcast_shapes(self_sizes, mask.shape))
            .masked_scatter(mask, grad).sum_to_size(self_sizes),
    },
    samples=samples(
        lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]])),
        lambda draw, index: (draw(2, 1), index([True, False, True])),
        lambda draw, index: (draw(2, 3), index([False])),
        lambda draw, index: (draw(), index(True)),
    ),
)
linear_in(
    "aten::masked_scatter",
    {
        "self": lambda grad, mask, self_sizes: grad.masked_fill(mask, 0).sum_to_size(self_sizes),
        "source": lambda grad, mask, source_sizes:
            torch.ops.aten.masked_scatter_backward(grad, mask, source_sizes),
    },
    samples=samples(
        lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]]), draw(4)),
        lambda draw, index: (draw(2, 3), index([True, False, True]), draw(2, 3)),
        lambda draw, index: (draw(3), index([[True], [False]]), draw(5)),
    ),
)
linear_in(
    "aten::masked_scatter_backward",
    {
        "grad_output": lambda grad, mask, grad_output_sizes:
            grad.new_zeros(grad_output_sizes).masked_scatter(mask, grad).sum_to_size(grad_output_sizes),
    },
    improves="missing",
    defer_to_stock=lambda *_: True,
    samples=samples(
        lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]]), [4]),
        lambda draw, index: (draw(2, 3), index([[True, False, True], [False, False, True]]), [2, 3]),
        lambda draw, index: (draw(3), index([False, True, False]), [2, 2]),
    ),
)
# fmt: on
