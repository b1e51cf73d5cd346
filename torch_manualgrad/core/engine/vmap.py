"""The vmap rule of last resort, and what a rule of the user returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...arguments import described
from ..schema import Signature

__all__ = ["batches", "loop"]


def batches(name: str, found: Any, size: int) -> tuple[Any, Any]:
    """The result of a vmap rule of the user, ``(output, out_dims)``, after a check that each tensor is a batch there.

    Args:
        name: of the rule, for the error.
        found: the result.
        size: of the batch.

    Raises:
        RuntimeError: it is something else.
    """
    if not isinstance(found, tuple) or len(found) != 2:
        raise RuntimeError(f"{name}: expected (output, out_dims), got {described(found)}")
    waiting = [found]
    while waiting:
        output, dim = waiting.pop()
        if isinstance(output, (tuple, list)):
            dims = dim if isinstance(dim, (tuple, list)) else [dim] * len(output)
            if len(dims) != len(output):
                raise RuntimeError(f"{name}: expected {len(output)} out_dims, one for each output, got {dims}")
            waiting += zip(output, dims)
        elif isinstance(output, Tensor) and dim is not None:
            if not isinstance(dim, int) or not -output.dim() <= dim < output.dim():
                raise RuntimeError(
                    f"{name}: out_dims has {dim!r} for {described(output)}: expected one of its dims, or None"
                )
            if output.shape[dim] != size:
                raise RuntimeError(
                    f"{name}: expected a batch of {size} in dim {dim} of the output, got {described(output)}"
                )
    return found


def loop(
    name: str, signature: Signature, call: Callable[..., Any], info: Any, in_dims: Sequence[Any], values: Sequence[Any]
) -> tuple[Any, Any]:
    """The vmap rule of last resort: one call for each element of the batch.

    Args:
        name: of the op, for the error.
        signature: of the op.
        call: the op, given all values by place.
        info: with ``batch_size``, as in `torch.library.register_vmap`.
        in_dims: for each value the dim of the batch, or None.
        values: those of the call.

    Returns:
        The outputs, and for each the dim of the batch.

    Raises:
        RuntimeError: the batch is empty.
    """
    if info.batch_size == 0:
        raise RuntimeError(f"{name} has no vmap implementation: a batch of size 0 has no element to call it on")
    results = []
    for k in range(info.batch_size):
        one = [_select(v, d, k) for v, d in zip(values, in_dims)]
        results.append(signature.outputs(call(*one)))
    outputs: list[Any] = []
    dims: list[Any] = []
    for column in zip(*results):
        first = column[0]
        if len({v is None for v in column}) > 1:
            raise RuntimeError(
                f"{name} has no vmap implementation, and an output is None for some elements of the batch and not for others"
            )
        if isinstance(first, Tensor):
            outputs.append(torch.stack(column))
            dims.append(0)
        elif isinstance(first, (list, tuple)):
            outputs.append([torch.stack(items) for items in zip(*column)])
            dims.append([0] * len(first))
        else:
            outputs.append(first)
            dims.append(None)
    return (outputs[0], dims[0]) if len(outputs) == 1 else (tuple(outputs), tuple(dims))


def _select(value: Any, dim: Any, k: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_select(v, d, k) for v, d in zip(value, dim)]
    return value if dim is None else value.select(dim, k)
