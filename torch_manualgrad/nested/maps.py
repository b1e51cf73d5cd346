"""Functions along one dim of the components of nested tensors that keep the dim: cumsum, softmax, log_softmax, glu.

Dims are counted as in `reductions`. The results have the argument's kind and are differentiable in every mode.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core.internals import only_autograd
from .conversion import on_nested
from .ragged import Ragged
from .segments import log_softmaxes, softmaxes, wide
from .slices import Slices, map_along, one_dim, scan

__all__ = ["cumsum", "glu", "log_softmax", "softmax"]


@on_nested
def cumsum(x: Ragged, dim: int) -> Ragged:
    """The cumulative sum along a dim of the components, as `torch.cumsum`.

    Args:
        x: the nested tensor.
        dim: a dim of the components.

    Returns:
        The kind and shape of ``x``; integers are summed in int64.

    Raises:
        IndexError: a dim out of range.
        ValueError: ``dim`` is the batch.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen cumsum.
    """

    def along(s: Slices) -> Tensor:
        v = s.values
        v = wide(v) if v.is_floating_point() or v.is_complex() else v.long()
        return scan(s, v, torch.add, 0).to(torch.int64 if v.dtype == torch.int64 else x.values.dtype)

    return map_along(x, dim, torch.cumsum, along)


def dense_softmax(x: Tensor, dim: int, log: bool = False) -> Tensor:
    """torch.softmax, or log_softmax, without PyTorch's tangent, which overwrites tensors that its backward needs."""
    if torch.compiler.is_compiling() or only_autograd():
        return torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
    shifted = wide(x - x.detach().amax(dim, keepdim=True) if x.shape[dim] else x)
    e = shifted.exp()
    total = e.sum(dim, keepdim=True)
    return (shifted - total.log() if log else e / total).to(x.dtype)


@on_nested
def softmax(x: Ragged, dim: int, dtype: torch.dtype | None = None) -> Ragged:
    """The softmax along a dim of the components, as `torch.softmax`.

    Args:
        x: real.
        dim: a dim of the components.
        dtype: ``x`` is converted to it first; None for the dtype of ``x``.

    Returns:
        The kind and shape of ``x``.

    Raises:
        IndexError: a dim out of range.
        ValueError: ``dim`` is the batch.
        RuntimeError: a dtype without a softmax.

    Note:
        Where not differentiable: nowhere; a slice with nan or $+inf$, or with only $-inf$, is nan.

    References:
        ATen softmax_nested, nested_softmax_backward.
    """
    return map_along(
        x if dtype is None else x.like(x.values.to(dtype)),
        dim,
        dense_softmax,
        lambda s: softmaxes(s.values, s.offsets, s.packed),
    )


@on_nested
def log_softmax(x: Ragged, dim: int, dtype: torch.dtype | None = None) -> Ragged:
    """The logarithm of the softmax along a dim of the components, as `torch.log_softmax`.

    Args:
        x: real.
        dim: as in `softmax`.
        dtype: as in `softmax`.

    Returns:
        The kind and shape of ``x``.

    Raises:
        IndexError, ValueError, RuntimeError: as `softmax`.

    Note:
        Where not differentiable: as `softmax`.

    References:
        ATen _log_softmax_backward_data.
    """
    return map_along(
        x if dtype is None else x.like(x.values.to(dtype)),
        dim,
        functools.partial(dense_softmax, log=True),
        lambda s: log_softmaxes(s.values, s.offsets, s.packed),
    )


@on_nested
def glu(x: Ragged, dim: int = -1) -> Ragged:
    """$a sigmoid(b)$, with $a$ and $b$ the halves of $x$ along a dense dim, as `torch.nn.functional.glu`.

    Args:
        x: real, with one ragged dim.
        dim: a dense dim of even size.

    Returns:
        The kind of ``x``, half as large in ``dim``.

    Raises:
        IndexError: a dim out of range.
        ValueError: ``dim`` is the batch, is ragged or has an odd size, or several dims are ragged.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen glu.
    """
    at = one_dim(x, dim)
    size = x.shape[at]
    if x.sizes is not None or size is None or size % 2:
        raise ValueError(f"dim: expected a dense dim of even size, got {dim} of a batch of shape {x.shape}")
    half = [n if d != at else size // 2 for d, n in enumerate(x.shape)]
    if torch.compiler.is_compiling() or only_autograd():
        return x.like(torch.nn.functional.glu(x.values, at - 1), half)
    a, b = wide(x.values).chunk(2, at - 1)  # the jvp of torch's own glu has no derivative
    return x.like((a * b.sigmoid()).to(x.dtype), half)
