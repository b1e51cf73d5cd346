"""Layers on a `Ragged`: convolution along the ragged dim, batch norm, padding of regular dims, prelu, bilinear maps.

They apply torch's own functions, with torch's derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .along import of_values
from .arithmetic import aligned
from .conversion import require_same_structure
from .ragged import Ragged
from .reshaping import one_ragged_dim, regular_dim

__all__ = ["batch_norm", "bilinear", "bucketize", "conv1d", "pad", "pairwise_distance", "prelu"]


def conv1d(
    input: Ragged,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Ragged:
    """A convolution of each component along its ragged dim, as ``torch.nn.functional.conv1d``.

    It pads the components to one length. Reads the lengths.

    Args:
        input: (B, C, *).
        weight: (D, C / groups, k).
        bias: (D,), or None.
        stride: as in torch.
        padding: as in torch; "same" with a kernel of odd extent.
        dilation: as in torch.
        groups: as in torch.

    Returns:
        (B, D, *). Component lengths change as torch's do; a component shorter than the kernel becomes empty.

    Raises:
        ValueError: a shape other than (B, C, *), or "same" with a kernel of even extent.
        RuntimeError: as in torch.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen conv1d.
    """
    if input.dim() != 3 or one_ragged_dim(input, "conv1d") != 2:
        raise ValueError(f"input: expected shape (B, C, *), got {input.summary()}")
    step, apart = (int(n if isinstance(n, int) else n[0]) for n in (stride, dilation))
    reach = apart * (weight.shape[2] - 1)
    if padding == "same" and reach % 2:
        raise ValueError(f"padding: 'same' needs a kernel of odd extent, got {reach + 1}")
    if isinstance(padding, str):
        edge = reach // 2 if padding == "same" else 0
    else:
        edge = int(padding if isinstance(padding, int) else padding[0])
    lengths = torch.div(input.lengths + 2 * edge - reach - 1, step, rounding_mode="floor").add(1).clamp(min=0)
    padded = input.to_padded()
    short = reach + 1 - 2 * edge - padded.shape[2]  # torch refuses a batch in which all are shorter than the kernel
    found = F.conv1d(F.pad(padded, (0, max(short, 0))), weight, bias, stride, edge, dilation, groups)
    return Ragged.from_padded(found, lengths=lengths, ragged_dim=2)


def batch_norm(input: Ragged, *args: Any, **kwargs: Any) -> Ragged:
    """Batch norm over all entries of each channel, as ``torch.nn.functional.batch_norm``; no padding is counted.

    Args:
        input: (B, C, ..., *, ...), with the channels in dim 1.
        args: as in torch.
        kwargs: as in torch.

    Returns:
        The shape of ``input``.

    Raises:
        ValueError: dim 1 is ragged, or as in torch.
        RuntimeError: as in torch.
    """
    regular_dim(input, 1, "batch_norm")
    return input.like(F.batch_norm(input.values.unsqueeze(0), *args, **kwargs).squeeze(0))


def pad(input: Ragged, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Ragged:
    """Pad regular dims, as ``torch.nn.functional.pad``.

    Args:
        input: with one ragged dim.
        pad: sizes before and after the last dim, the one in front of it, and so on; 0 for the ragged dim.
        mode: as in torch.
        value: as in torch.

    Returns:
        A `Ragged` with larger regular dims.

    Raises:
        ValueError: the batch or the ragged dim would be padded.
        RuntimeError, NotImplementedError: as in torch.
    """
    for k in range(len(pad) // 2):
        if pad[2 * k] or pad[2 * k + 1]:
            regular_dim(input, -1 - k, "pad", "pad")
    return of_values(input, F.pad(input.values, list(pad), mode, value), input.packed_dim)


def prelu(input: Ragged, weight: Tensor) -> Ragged:
    """$x$ where positive, else $w x$, as ``torch.nn.functional.prelu``; several weights are those of the channels in dim 1.

    Args:
        input: the batch.
        weight: (1,) or (C,).

    Returns:
        The shape of ``input``.

    Raises:
        ValueError: several weights, and dim 1 is ragged.
        RuntimeError: as in torch.
    """
    if weight.numel() == 1:
        return input.like(F.prelu(input.values, weight))
    regular_dim(input, 1, "prelu")
    return input.like(F.prelu(input.values.unsqueeze(0), weight).squeeze(0))


def bilinear(input1: Ragged, input2: Ragged, weight: Tensor, bias: Tensor | None = None) -> Ragged:
    """$x W y + b$ of the last dims, as ``torch.nn.functional.bilinear``.

    Args:
        input1: $x$, (B, ..., *, ..., m).
        input2: $y$, (B, ..., *, ..., n), with the components of $x$.
        weight: $W$, (k, m, n).
        bias: $b$, (k,), or None.

    Returns:
        (B, ..., *, ..., k).

    Raises:
        ValueError: arguments that do not fit, or a ragged last dim.
        RuntimeError: as in torch.
    """
    regular_dim(input1, -1, "bilinear")
    require_same_structure(input1, input2, name="input2")
    return of_values(input1, F.bilinear(input1.values, input2.values, weight, bias), input1.packed_dim)


def pairwise_distance(
    x1: Ragged | Tensor, x2: Ragged | Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Ragged:
    """The norms of differences along the last dim, as ``torch.nn.functional.pairwise_distance``.

    Args:
        x1: a `Ragged`, or dense as in `add`.
        x2: the same.
        p: as in torch.
        eps: as in torch.
        keepdim: as in torch.

    Returns:
        A `Ragged` without the last dim.

    Raises:
        ValueError: arguments that do not fit, or a ragged last dim.
    """
    nested, (a, b) = aligned((x1, x2), ("x1", "x2"))
    regular_dim(nested, -1, "pairwise_distance")
    return of_values(nested, F.pairwise_distance(a, b, p, eps, keepdim), nested.packed_dim)


def bucketize(input: Ragged, boundaries: Tensor, **options: Any) -> Ragged:
    """The index of the bucket of each entry, as `torch.bucketize`.

    Args:
        input: the batch.
        boundaries: as in torch.
        options: as in torch.

    Returns:
        int64, the shape of ``input``.

    Raises:
        RuntimeError: as in torch.
    """
    return input.like(torch.bucketize(input.values, boundaries, **options))
