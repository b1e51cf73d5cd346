"""Selection of one of two tensors, or of a constant, by a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import elementwise, formula


@formula
def masked_fill_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """Cotangent of the number that is filled in where a mask is True: the sum of $g$ there.

    Args:
        grad: $g$, cotangent of the result.
        mask: bool, broadcast with the result.

    Returns:
        ().
    """
    return torch.where(mask, grad, 0).sum()


elementwise(
    "aten::where.self",
    {
        "self": lambda grad, condition: torch.where(condition, grad, 0),
        "other": lambda grad, condition: torch.where(condition, 0, grad),
    },
    finite=True,
)
elementwise("aten::masked_fill.Scalar", {"self": lambda grad, mask: grad.masked_fill(mask, 0)}, finite=True)
elementwise(
    "aten::masked_fill.Tensor",
    {"self": lambda grad, mask: grad.masked_fill(mask, 0), "value": lambda grad, mask: torch.where(mask, grad, 0)},
    finite=True,
)
elementwise("aten::fill.Tensor", {"self": None, "value": 1}, finite=True)
