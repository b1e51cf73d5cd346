"""Sums and means, over some dims or along one, and the trace.

All but nansum are linear: a tangent replaces the input, and each entry of the input gets the cotangent of the sum that
contains it.

Args:
    grad: cotangent of the sum.
    dim: the reduced dims; None or empty for all.
    keepdim: whether ``grad`` has the reduced dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in, rule

from .dims import cast, restore_reduced_dims


@formula
def sum_backward(grad: Tensor, sizes: Sequence[int], dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Cotangent of $x$, given that of its sum over ``dim``: the same for every entry that was summed.

    Args:
        sizes: the shape of $x$.

    Returns:
        ``sizes``, in the dtype of ``grad``; its entries share memory.

    References:
        ATen sum_backward, both overloads.
    """
    return restore_reduced_dims(grad, len(sizes), dim, keepdim).expand(sizes)


@formula
def nansum_backward(grad: Tensor, self: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Cotangent of $x$, given that of the sum of the entries that are not nan: that of the sum, and 0 where $x$ is nan.

    Args:
        self: $x$, (*).

    Returns:
        The shape of ``self``, in the dtype of ``grad``.
    """
    return torch.where(self.isnan(), 0, sum_backward(grad, self.shape, dim, keepdim))


@formula
def mean_backward(grad: Tensor, shape: Sequence[int], dim: Sequence[int] | None, numel: int, keepdim: bool) -> Tensor:
    """Cotangent of $x$, given that of its mean over ``dim``: that of the sum, divided by the number of entries.

    Args:
        grad: cotangent of the mean.
        shape: that of $x$.
        numel: the number of entries of $x$.

    Returns:
        ``shape``, in the dtype of ``grad``.
    """
    n = math.prod(shape[d] for d in dim) if dim and shape else numel
    return sum_backward(grad, shape, dim, keepdim) / n


@formula
def cumsum_backward(grad: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of its cumulative sums: the sums of the cotangents from each entry to the last.

    Args:
        grad: cotangent of the sums.
        dim: the dim along which they run.

    Returns:
        The shape of ``grad``.
    """
    return grad.flip(dim).cumsum(dim).flip(dim) if grad.dim() else grad


# -- the rules --------------------------------------------------------------------------------------------------------


linear_in("aten::sum", {"self": lambda grad, self_sizes, self_dtype: cast(grad.expand(self_sizes), self_dtype)})
linear_in(
    "aten::sum.dim_IntList",
    {
        "self": lambda grad, self_sizes, self_dtype, dim, keepdim: cast(
            sum_backward(grad, self_sizes, dim, keepdim), self_dtype
        )
    },
)
linear_in(
    "aten::mean",
    {
        "self": lambda grad, self_sizes, self_dtype: cast(
            mean_backward(grad, self_sizes, None, math.prod(self_sizes), False), self_dtype
        )
    },
)
linear_in(
    "aten::mean.dim",
    {
        "self": lambda grad, self_sizes, self_dtype, dim, keepdim: cast(
            mean_backward(grad, self_sizes, dim, math.prod(self_sizes), keepdim), self_dtype
        )
    },
)
linear_in("aten::cumsum", {"self": lambda grad, self_dtype, dim: cumsum_backward(cast(grad, self_dtype), dim)})
linear_in(
    "aten::trace",
    {"self": lambda grad, self_sizes: grad * torch.eye(*self_sizes, dtype=grad.dtype, device=grad.device)},
)
rule(
    "aten::nansum",
    vjp={"self": lambda grad, self, dim, keepdim: nansum_backward(cast(grad, self.dtype), self, dim, keepdim)},
    jvp={
        "result": lambda self_p, self_t, dim, keepdim, dtype: torch.where(self_p.isnan(), 0, self_t).sum(
            dim, keepdim, dtype=dtype
        )
    },
    source="ATen nansum_backward",
    finite=True,
)
