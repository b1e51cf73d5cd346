"""Layers on a `Ragged`: lookups, convolution along the ragged dim, batch norm, padding of regular dims, prelu, bilinear maps.

They apply torch's own functions, with torch's derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .along import of_values
from .conversion import require_same_structure
from .packing import cumulated, filled, segments
from .ragged import Ragged
from .reshaping import batch, one_ragged_dim, regular_dim

__all__ = [
    "batch_norm",
    "bilinear",
    "bucketize",
    "conv1d",
    "embedding",
    "one_hot",
    "pad",
    "positions",
    "prelu",
]


def _with_new_last_dim(x: Ragged, values: Tensor) -> Ragged:
    return x.like(values, [*x.shape, values.shape[-1]])


def embedding(input: Ragged, weight: Tensor, *args: Any, **kwargs: Any) -> Ragged:
    """Look up rows of a matrix by the indices in a batch, as ``torch.nn.functional.embedding``.

    Args:
        input: integers, with one ragged dim, (B, ..., *, ...).
        weight: (rows, D).
        args: as in torch.
        kwargs: as in torch.

    Returns:
        (B, ..., *, ..., D).

    Raises:
        ValueError: several ragged dims.
        IndexError: as in torch.
    """
    one_ragged_dim(input, "embedding")
    return _with_new_last_dim(input, F.embedding(input.values, weight, *args, **kwargs))


def one_hot(input: Ragged, num_classes: int = -1) -> Ragged:
    """Unit vectors, as ``torch.nn.functional.one_hot``.

    Args:
        input: integers, with one ragged dim.
        num_classes: as in torch.

    Returns:
        A `Ragged` with one more dim.

    Raises:
        ValueError: several ragged dims.
        RuntimeError: as in torch.
    """
    one_ragged_dim(input, "one_hot")
    return _with_new_last_dim(input, F.one_hot(input.values, num_classes))


def positions(x: Ragged) -> Ragged:
    """The position of each entry along the ragged dim of its component: 0, 1, ..., int64.

    Args:
        x: with one ragged dim.

    Returns:
        (B, *).

    Raises:
        ValueError: several ragged dims.
    """
    one_ragged_dim(x, "positions")
    places = torch.arange(x.values.shape[x.packed_dim], device=x.offsets.device)
    return Ragged.trusted(places - x.offsets[x.segment_ids()], x.offsets, (x.batch, None))


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

    It copies the window of each output, so that no other entries enter the derivatives. Reads the lengths.

    Args:
        input: (B, C, *).
        weight: (D, C / groups, k).
        bias: (D,), or None.
        stride: as in torch.
        padding: as in torch.
        dilation: as in torch.
        groups: as in torch.

    Returns:
        (B, D, *). Component lengths change as torch's do; a component shorter than the kernel becomes empty.

    Raises:
        ValueError: a shape other than (B, C, *).
        RuntimeError: as in torch.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen conv1d.
    """
    if one_ragged_dim(input, "conv1d") != 2 or input.dim() != 3:
        raise ValueError(f"input: expected shape (B, C, *), got {input.summary()}")
    step, apart = (n if isinstance(n, int) else n[0] for n in (stride, dilation))
    signal = input.values.new_zeros(1, input.values.shape[0], 1 + weight.shape[-1] * max(apart, 1))
    F.conv1d(signal, weight, bias, stride, padding, dilation, groups)  # raises torch's errors of the arguments
    reach = apart * (weight.shape[-1] - 1)
    if isinstance(padding, str):
        around = reach if padding == "same" else 0
    else:
        around = 2 * (padding if isinstance(padding, int) else padding[0])
    lengths = torch.div(input.lengths + around - reach - 1, step, rounding_mode="floor").add(1).clamp(min=0)
    offsets = cumulated(lengths)
    which = segments(offsets, int(offsets[-1]))
    starts = step * (torch.arange(len(which), device=which.device) - offsets[which]) - around // 2
    taps = starts[:, None] + apart * torch.arange(weight.shape[-1], device=which.device)
    inside = (taps >= 0) & (taps < input.lengths[which][:, None])
    windows = filled(input.values, 1, 0.0, input.offsets[which][:, None] + taps, inside)
    grouped = windows.unflatten(0, (groups, -1)), weight.unflatten(0, (groups, -1))
    found = torch.einsum("gctk,gdck->gdt", *grouped).flatten(0, 1)
    return Ragged.trusted(
        found if bias is None else found + bias[:, None], offsets, (input.batch, weight.shape[0], None)
    )


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
    inside = list(pad[: 2 * input.values.dim()])  # without the batch
    return of_values(input, F.pad(input.values, inside, mode, value), input.packed_dim)


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
        return batch(input, "prelu").like(F.prelu(input.values, weight))
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
    return batch(input, "bucketize").like(torch.bucketize(input.values, boundaries, **options))
