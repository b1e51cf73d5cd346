"""What the losses share: the reduction, and the shapes of gradients and of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import is_sharded

__all__ = [
    "MEAN",
    "NONE",
    "SUM",
    "fitted",
    "in_one_precision",
    "leaf",
    "of_all",
    "paired",
    "random",
    "reduced",
    "scaled",
]

NONE, MEAN, SUM = 0, 1, 2


def reduced(x: Tensor, reduction: int) -> Tensor:
    """The mean, the sum, or x itself."""
    return x.mean() if reduction == MEAN else x.sum() if reduction == SUM else x


def scaled(x: Tensor, reduction: int, like: Tensor) -> Tensor:
    """x, divided by the number of losses where their mean is taken."""
    return x / like.numel() if reduction == MEAN else x


def of_all(grad: Tensor, like: Tensor, reduction: int) -> tuple[Tensor, int]:
    """What an operator of PyTorch's is given for a cotangent and a reduction: a rank would divide by the number of losses in
    its own part of distributed tensors, so that the division is done here."""
    if reduction == MEAN and is_sharded(like):
        return grad / like.numel(), SUM
    return grad, reduction


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """A gradient, in the shape and dtype of what was broadcast."""
    return x.sum_to_size(like.shape).to(like.dtype)


def paired(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their common shape: PyTorch's operators count the entries of the first."""
    return (x, y) if x.shape == y.shape else torch.broadcast_tensors(x, y)


def random(*shape: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """For samples: normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)


def leaf(x: Tensor) -> Tensor:
    """For samples: one of the inputs that are differentiated, where others are not."""
    return x.requires_grad_()


def _floating(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def in_one_precision(f: Callable[..., Any]) -> Callable[..., Any]:
    """A probe: the function with its constants, given by keyword, in the dtype of its first tensor."""

    def probe(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        same = {k: first.dtype if isinstance(v, torch.dtype) else _floating(v, first.dtype) for k, v in kwargs.items()}
        return f(first, *args, **same)

    return probe
