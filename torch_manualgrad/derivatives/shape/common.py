"""Tensors converted to a dtype, cropped to a shape, or padded to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["corner", "in_corner", "of_dtype", "zero_of"]


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """$x$ in this dtype; its real part if the dtype is real."""
    return (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def corner(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The entries of $x$ whose indices are below these sizes."""
    return x if x.shape == tuple(sizes) else x[tuple(slice(n) for n in sizes)]


def in_corner(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Zeros of these sizes with $x$ at the lowest indices; a single entry may have a dim too many or too few."""
    if x.shape == tuple(sizes):
        return x
    if x.numel() == 0:
        return x.new_zeros(sizes)
    if x.dim() != len(sizes):
        x = x.reshape([1] * len(sizes))
    return torch.constant_pad_nd(x, [p for d in reversed(range(x.dim())) for p in (0, sizes[d] - x.shape[d])])


def zero_of(grad: Tensor, self_sizes: Sequence[int]) -> Tensor:
    """The gradient of an input of which the operator reads only the sizes."""
    return grad.new_zeros(self_sizes)
