"""Functions that mutated formulas call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_of(x: Tensor, *sizes: Any) -> Tensor:
    """In place of `sum_to_size`: the first of what is to be summed."""
    shape = torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    for dim, (n, m) in enumerate(zip(x.shape, (1,) * (x.dim() - len(shape)) + tuple(shape))):
        if m == 1 and n > 1:
            x = x.narrow(dim, 0, 1)
    return x.reshape(shape)


def linearized(a: Any, b: Any) -> Any:
    """a b with its first derivatives, but no second one."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a * b
    return a.detach() * b + a * b.detach() - a.detach() * b.detach()


def linearized_matmul(a: Tensor, b: Tensor) -> Tensor:
    """A B with its first derivatives, but no second one."""
    return a.detach() @ b + a @ b.detach() - a.detach() @ b.detach()


def bent(derivative: Any, x: Any) -> Any:
    """A derivative with its own first derivative, but another second one."""
    if not isinstance(derivative, Tensor) or derivative.dtype is torch.bool or not isinstance(x, Tensor):
        return derivative
    return derivative + (x - x.detach()) ** 2
