"""Tensors put together and taken apart: cat, stack, block_diag, and splits that are no views.

Args:
    grads: of each part, or None for zero; of one at least.
    dim: along which $x$ is split.
    sizes: of $x$.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in

from .common import of_dtype

__all__ = ["split_backward", "split_with_sizes_backward"]


@formula
def split_with_sizes_backward(
    grads: Sequence[Tensor | None], split_sizes: Sequence[int], dim: int, sizes: Sequence[int]
) -> Tensor:
    """Cotangent of $x$, given those of its parts along a dim: their concatenation.

    Args:
        split_sizes: sizes of the parts along ``dim``.

    Returns:
        Of shape ``sizes``.
    """
    like = next(g for g in grads if g is not None)

    def zeros(n: int) -> Tensor:
        shape = list(sizes)
        shape[dim] = n
        return like.new_zeros(shape)

    return torch.cat([zeros(n) if g is None else g for g, n in zip(grads, split_sizes)], dim)


@formula
def split_backward(grads: Sequence[Tensor | None], split_size: int, dim: int, sizes: Sequence[int]) -> Tensor:
    """Cotangent of $x$, given those of its parts of equal size, of which the last may be smaller.

    Args:
        split_size: of the parts along ``dim``.

    Returns:
        Of shape ``sizes``.
    """
    last = sizes[dim] - split_size * (len(grads) - 1)
    return split_with_sizes_backward(grads, [split_size] * (len(grads) - 1) + [last], dim, sizes)


def _parts(found: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [of_dtype(x, d) for x, d in zip(found, dtypes)]


def _cat_vjp(grad: Tensor, dim: int, tensors_sizes: Any, tensors_dtype: Any) -> list[Tensor]:
    # a tensor of shape (0,) is left out of any concatenation
    empty = [tuple(sizes) == (0,) and grad.dim() > 1 for sizes in tensors_sizes]
    lengths = [0 if skip else sizes[dim] for sizes, skip in zip(tensors_sizes, empty)]
    found = list(grad.split_with_sizes(lengths, dim))
    return _parts([grad.new_zeros(0) if skip else x for x, skip in zip(found, empty)], tensors_dtype)


def _stack_vjp(grad: Tensor, dim: int, tensors_dtype: Any) -> list[Tensor]:
    return _parts(grad.unbind(dim), tensors_dtype)


def _block_diag_vjp(grad: Tensor, tensors_sizes: Any, tensors_dtype: Any) -> list[Tensor]:
    found, row, column = [], 0, 0
    for sizes in tensors_sizes:
        m, n = ([1, 1] + list(sizes))[-2:]
        found.append(grad[row : row + m, column : column + n].reshape(sizes))
        row, column = row + m, column + n
    return _parts(found, tensors_dtype)


linear_in("aten::cat", {"tensors": _cat_vjp})
linear_in("aten::stack", {"tensors": _stack_vjp})
linear_in("aten::block_diag", {"tensors": _block_diag_vjp})
linear_in("aten::unsafe_split.Tensor", {"self": split_backward.bind(grads="grad", sizes="self_sizes")})
linear_in(
    "aten::unsafe_split_with_sizes",
    {"self": split_with_sizes_backward.bind(grads="grad", sizes="self_sizes")},
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator"),
)
