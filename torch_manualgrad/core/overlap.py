"""Whether tensors share elements. Refuses an in-place write whose operand partly overlaps the result.

The result then depends on the order of the writes, and has no derivative. PyTorch refuses such an operand if both
tensors are dense, and writes otherwise, as in ``x[..., ::2].mul_(x[..., 1:4])``. An operand that is the tensor itself
is allowed: each element is read before it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .internals import apart, storage_of, value_of, values_readable
from .schema import Signature, tensors_in

__all__ = ["refuse_partial_overlap", "share_elements"]

_MOST = 2**20  # up to this number of elements, all places are compared


def refuse_partial_overlap(op: Any, signature: Signature, values: Sequence[Any]) -> None:
    """Raise if an argument shares a part of its memory with the first one, which is written to.

    Tensors with different strides and more than `_MOST` elements together are not compared: PyTorch decides.

    Args:
        op: the operator.
        signature: with the names of its arguments.
        values: its arguments.

    Raises:
        RuntimeError: the order decides whether an element of an argument is written before it is read.
    """
    written = values[0]
    storage = storage_of(written)
    if storage is None:
        return
    for i in signature.tensor_like[1:]:
        if _is_filled_in(signature.names[i], values, i):
            continue
        for x in tensors_in((values[i],)):
            if storage_of(x) is storage and values_readable((written, x)) and _overlaps(value_of(written), value_of(x)):
                name, first = signature.names[i], signature.names[0]
                raise RuntimeError(
                    f"{op.name()}: {name!r} and {first!r}, which is written to, refer in part to a single memory "
                    f"location, so the result depends on the order of the writes. Please clone() {name!r} before the call."
                )


def _is_filled_in(name: str, values: Sequence[Any], i: int) -> bool:
    """Whether this is the value of a fill, read once before any write; also of ``x[mask] = value``."""
    if name == "values" and isinstance(values[i], Tensor) and values[i].numel() == 1:
        return (
            all(index is None or index.dtype is torch.bool for index in tensors_in(values[1:i])) and values[-1] is False
        )
    return name == "value"


def _overlaps(written: Tensor, x: Tensor) -> bool:
    """Whether an element of ``x`` shares memory with an element of ``written`` at another position."""
    alike = written.dtype == x.dtype
    if alike and (x.shape, x.stride(), x.storage_offset()) == (
        written.shape,
        written.stride(),
        written.storage_offset(),
    ):
        return False
    if not written.numel() or not x.numel():
        return False
    unit = min(written.element_size(), x.element_size())
    (first, last, strides), (other_first, other_last, other_strides) = _span(written, unit), _span(x, unit)
    if last < other_first or other_last < first:
        return False
    if alike and (written.shape, written.stride()) == (x.shape, x.stride()):
        return _is_between(*_distance(x, written))
    if written.numel() + x.numel() > _MOST:
        return False  # comparing all places would take longer than the operator
    step = math.gcd(*strides, *other_strides)
    if alike and step and (first - other_first) % step:
        return False  # like two columns of a matrix
    if alike and _expands(x, written):
        at, read = _places(written, unit), _places(x.expand_as(written), unit)
        return bool((torch.isin(read, at) & (read != at)).any())
    return bool(torch.isin(_places(x, unit), _places(written, unit)).any())


def share_elements(x: Tensor, y: Tensor) -> bool:
    """Whether an element of ``x`` is one of ``y``. Both have one storage; their values need not be readable."""
    if not x.numel() or not y.numel():
        return False
    unit = min(x.element_size(), y.element_size())
    (first, last, strides), (other_first, other_last, other_strides) = _span(x, unit), _span(y, unit)
    if last < other_first or other_last < first:
        return False
    if x.dtype == y.dtype:
        if x.stride() == y.stride():
            return _is_between(*_distance(x, y))
        step = math.gcd(*strides, *other_strides)
        if step and (first - other_first) % step:
            return False
    with apart():
        return bool(torch.isin(_places(x, unit), _places(y, unit)).any())


def _distance(x: Tensor, y: Tensor) -> tuple[int, list[tuple[int, int, int]]]:
    """From the first element of ``y`` to that of ``x``; and (stride, size of x, size of y) of the dims, of equal strides."""
    sizes = sorted(zip(map(int, x.stride()), map(int, x.shape), map(int, y.shape)), reverse=True)
    return int(x.storage_offset()) - int(y.storage_offset()), sizes


def _is_between(distance: int, sizes: list[tuple[int, int, int]]) -> bool:
    """Whether an element of y is as far from the first one of y as one of x is, plus the distance."""
    if not sizes:
        return distance == 0
    (stride, size, other_size), *inner = sizes
    if stride == 0 or size == other_size == 1:
        return _is_between(distance, inner)
    low, high = -sum(s * (n - 1) for s, n, _ in inner), sum(s * (m - 1) for s, _, m in inner)
    first, last = -((high - distance) // stride), (distance - low) // stride
    steps = range(max(first, 1 - size), min(last, other_size - 1) + 1)
    return any(_is_between(distance - step * stride, inner) for step in steps)


def _span(x: Tensor, unit: int) -> tuple[int, int, list[int]]:
    """The first and the last place, and the strides, in multiples of ``unit`` bytes."""
    size = x.element_size() // unit
    strides = [size * s for n, s in zip(x.shape, x.stride()) if n > 1]
    first = size * int(x.storage_offset())
    return first, first + sum(size * int(s) * (n - 1) for n, s in zip(x.shape, x.stride())) + size - 1, strides


def _expands(x: Tensor, written: Tensor) -> bool:
    return x.dim() <= written.dim() and all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(written.shape)))


def _places(x: Tensor, unit: int) -> Tensor:
    size = x.element_size() // unit
    at = torch.tensor(size * x.storage_offset(), device="cpu")
    for n, stride in zip(x.shape, x.stride()):
        at = at.unsqueeze(-1) + size * stride * torch.arange(n, device="cpu")
    return at.unsqueeze(-1) + torch.arange(size, device="cpu")
