"""What the parts of a `Ragged` have to be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.arguments import described

if TYPE_CHECKING:
    from .ragged import Ragged

__all__ = ["check_contents", "check_structure", "check_types", "check_values"]


def check_types(values: Any, offsets: Any, shape: Any, sizes: Any) -> None:
    """Whether what a user gives is tensors and sizes. Transforms build batches of other things, by other ways."""
    for name, x in (("values", values), ("offsets", offsets)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {described(x)}")
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense Tensor, got {described(x)}")
    if values.is_meta != offsets.is_meta:
        raise ValueError(
            f"offsets: expected a tensor on {values.device}, where values are, got one on {offsets.device}"
        )
    if sizes is not None and not isinstance(sizes, Tensor):
        raise TypeError(f"sizes: expected a Tensor or None, got {described(sizes)}")
    if sizes is not None and (sizes.is_nested or sizes.layout is not torch.strided):
        raise TypeError(f"sizes: expected a dense Tensor, got {described(sizes)}")
    if sizes is not None and sizes.is_meta != values.is_meta:
        raise ValueError(f"sizes: expected a tensor on {values.device}, where values are, got one on {sizes.device}")
    if not isinstance(shape, (list, tuple)) or not all(n is None or isinstance(n, (int, torch.SymInt)) for n in shape):
        raise TypeError(f"shape: expected a list or tuple, each entry an int or None, got {described(shape)}")


def check_structure(x: Ragged) -> None:
    offsets, sizes, ragged = x.offsets, x.sizes, x.ragged_dims
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets: expected int32 or int64, got {offsets.dtype}")
    if not ragged or ragged[0] == 0 or any(n is not None and n < 0 for n in x.shape):
        raise ValueError(f"shape: expected the batch and sizes, at least one of them ragged (None), got {x.shape}")
    if list(offsets.shape) != [(x.shape[0] or 0) + 1]:
        raise ValueError(f"offsets: expected shape [{(x.shape[0] or 0) + 1}] for {x.shape}, got {list(offsets.shape)}")
    if (sizes is None) != (len(ragged) == 1):
        raise ValueError(f"sizes: given exactly if several dims are ragged, which of {x.shape} are {list(ragged)}")
    if sizes is not None and list(sizes.shape) != [x.shape[0], len(ragged)]:
        raise ValueError(f"sizes: expected shape {[x.shape[0], len(ragged)]}, got {list(sizes.shape)}")
    if sizes is not None and sizes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sizes: expected int32 or int64, got {sizes.dtype}")


def check_values(x: Ragged) -> None:
    values, expected = x.values, x.shape[1:] if x.sizes is None else (None,)
    if values.dim() != len(expected) or any(e is not None and e != n for e, n in zip(expected, values.shape)):
        raise ValueError(f"values: shape {list(values.shape)} does not fit {x!r}, packed as {list(expected)}")


def check_contents(x: Ragged) -> None:
    at, sizes = x.read()
    end = x.values.shape[x.packed_dim]
    if at[0] != 0:
        raise ValueError(f"offsets: expected to start at 0, got {at[0]}")
    for i, (a, b) in enumerate(zip(at, at[1:])):
        if b < a:
            raise ValueError(f"offsets: they decrease from {a} to {b} at component {i}")
    if at[-1] != end:
        raise ValueError(f"offsets: expected to end with the buffer at {end}, got {at[-1]}")
    if sizes is not None:
        counts = [math.prod(x.component_shape(n)) for n in sizes]
        if any(n < 0 for row in sizes for n in row) or counts != [b - a for a, b in zip(at, at[1:])]:
            raise ValueError(f"sizes: components of {counts} entries do not fit offsets {at}")
