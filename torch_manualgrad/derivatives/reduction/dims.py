"""Helpers for reductions: dims that a reduction has removed, and the dtype and the memory layout of a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def restore_reduced_dims(output: Tensor, ndim: int, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    """A result, or its cotangent, in a shape that broadcasts with the input of ``ndim`` dims that was reduced."""
    if keepdim or not dim or not ndim:
        return output
    for d in sorted(d % ndim for d in dim):
        output = output.unsqueeze(d)
    return output


def cast(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in the dtype of the input that was converted before the reduction; real for a real input."""
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(dtype)


def laid_out_as(gradient: Tensor, input: Tensor) -> Tensor:
    """A gradient whose dims have the same order in memory as those of the input: channels last stays channels last."""
    if input.dim() < 2 or input.is_contiguous() or 0 in input.stride():
        return gradient.contiguous()
    order = sorted(range(input.dim()), key=lambda d: (input.stride(d), input.shape[d]), reverse=True)
    return gradient.permute(order).contiguous().permute([order.index(d) for d in range(input.dim())])
