"""The reduction of a loss, and the shapes of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import is_sharded

__all__ = [
    "MEAN",
    "NONE",
    "SUM",
    "fitted",
    "of_all",
    "paired",
    "reduced",
    "scaled",
]

NONE, MEAN, SUM = 0, 1, 2


def reduced(x: Tensor, reduction: int) -> Tensor:
    """The mean, the sum, or $x$ itself."""
    return x.mean() if reduction == MEAN else x.sum() if reduction == SUM else x


def scaled(x: Tensor, reduction: int, like: Tensor) -> Tensor:
    """$x$, divided by the number of losses if the reduction is their mean."""
    return x / like.numel() if reduction == MEAN else x


def of_all(grad: Tensor, like: Tensor, reduction: int) -> tuple[Tensor, int]:
    """Cotangent and reduction for a PyTorch operator. For distributed tensors, the division for a mean is done here: a rank
    would divide by the number of losses in its own shard."""
    if reduction == MEAN and is_sharded(like):
        return grad / like.numel(), SUM
    return grad, reduction


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """A gradient, reduced to the shape and dtype of the input that was broadcast."""
    return x.sum_to_size(like.shape).to(like.dtype)


def paired(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in their common shape: PyTorch's operators count the entries of the first."""
    return (x, y) if x.shape == y.shape else torch.broadcast_tensors(x, y)
