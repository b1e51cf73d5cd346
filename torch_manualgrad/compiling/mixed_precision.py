"""Normalizations of half precision with parameters in float32, as autocast calls them on the CPU.

There the statistics are in float32, and the gradient of the input is in half precision. PyTorch's fake kernels say otherwise,
and a graph would round the statistics. So these operators run in float32 in a graph, and the result is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["in_float32"]

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)


def _widened(op: Any, *places: int) -> Callable[..., Any]:
    """A decomposition of an operator whose arguments at ``places`` and first result are in half precision."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        dtype = args[places[-1]].dtype
        if dtype not in _NARROW or tensors[0].device.type != "cpu" or all(x.dtype == dtype for x in tensors):
            return NotImplemented
        first, *others = op(*[x.float() if i in places else x for i, x in enumerate(args)], **kwargs)
        return first if first is None else first.to(dtype), *others

    return run


#: Decompositions of operators, by overload.
in_float32: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _widened(aten.native_layer_norm.default, 0),
    aten.native_group_norm.default: _widened(aten.native_group_norm.default, 0),
    aten.native_group_norm_backward.default: _widened(aten.native_group_norm_backward.default, 0, 1),
    **{
        op: _widened(op, 0)
        for op in (
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._native_batch_norm_legit_no_training.default,
            aten._batch_norm_with_update.default,
            aten._batch_norm_with_update_functional.default,
        )
    },
}
