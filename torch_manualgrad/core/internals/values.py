"""What tensors hold: their memory, and their values where these can be read."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from .dispatch import below_autograd, values_hidden
from .functorch import PLAIN

__all__ = ["DispatchMode", "decompositions", "is_finite", "memory_of", "value_of", "values_readable"]

# Of a fused operator, what computes the same in operators that are none.
decompositions: dict[Any, Callable[..., Any]] = decomposition_table


def value_of(x: Tensor) -> Tensor:
    """The tensor inside of the wrappers of torch.func: for a batch, the whole of it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def memory_of(x: Tensor) -> int | None:
    """What all views of one tensor have in common; None for a tensor without memory, or of another layout."""
    if x.layout is not torch.strided or x.is_nested or x._is_zerotensor():
        return None
    return x.untyped_storage()._cdata


def values_readable(x: Tensor) -> bool:
    """Whether a program may depend on the values of ``x``: not in a graph that is traced, or captured by CUDA."""
    x = value_of(x)
    if type(x) not in PLAIN or x.device.type == "meta" or torch.compiler.is_dynamo_compiling() or values_hidden():
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def is_finite(x: Tensor) -> bool:
    """Whether no element is infinite or nan, by their sum: it may leave the range where they do not. It waits for a device."""
    x = value_of(x)
    if x.layout is not torch.strided or x.is_nested or x._is_zerotensor():
        return True
    with below_autograd():
        total = x.sum(dtype=torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x.sum()
        return cmath.isfinite(total.item())
