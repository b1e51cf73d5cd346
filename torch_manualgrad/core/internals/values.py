"""The contents of tensors: their memory, and their values if these can be read."""

from __future__ import annotations

import cmath
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .dispatch import below_autograd, values_hidden
from .dynamo import skipped_by_dynamo
from .functorch import PLAIN

__all__ = [
    "DispatchMode",
    "are_finite",
    "constants_unwritten",
    "decompositions",
    "layers",
    "memory_of",
    "value_of",
    "values_readable",
]

# Equivalents of fused operators, made of unfused ones.
decompositions: dict[Any, Callable[..., Any]] = decomposition_table


class DispatchMode(TorchDispatchMode):
    """A mode that sees calls below autograd, and that Dynamo does not compile.

    PyTorch's own way to exclude Dynamo imports it at the mode's first call, which takes a second.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        skipped_by_dynamo(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _is_linearizing() -> bool:
    """Whether torch.func.linearize is running: only its frame tells it from make_fx of a function with a dual level."""
    code = inspect.unwrap(torch.func.linearize).__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class _ConstantsUnwritten(DispatchMode):
    """Raises if an operator writes to a tensor that does not depend on the tangents."""

    def __init__(self, tangents: Iterable[Any], what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dependent = {id(x): x for x in tangents}  # with the tensors, so that no other gets the id of one
        self._what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dependent = any(id(x) in self._dependent for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        if dependent and func._schema.is_mutable:
            given = dict(zip([a.name for a in func._schema.arguments], args)) | kwargs
            written = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            constant = [x for x in tree_leaves(written) if isinstance(x, Tensor) and id(x) not in self._dependent]
            if constant and _is_linearizing():
                raise RuntimeError(
                    f"{self._what} writes tangents to a tensor that does not depend on them. torch.func.linearize computes such a "
                    "tensor once, and would lose the write. Compute the result without it, for example with torch.cat or torch.where"
                )
        found = func(*args, **kwargs)
        if dependent:
            self._dependent.update((id(x), x) for x in tree_leaves(found))
        return found


def constants_unwritten(tangents: Any, what: str) -> AbstractContextManager[Any]:
    """A context for a user's formula of tangents, which raises where torch.func.linearize would lose a write.

    Args:
        tangents: a pytree.
        what: the formula, in errors.
    """
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # slow to import
    if tracer is None or tracer.get_proxy_mode() is None:
        return nullcontext()
    return _ConstantsUnwritten(tree_leaves(tangents), what)


def value_of(x: Tensor) -> Tensor:
    """The tensor inside of the wrappers of torch.func; for a batch, all of it. In Dynamo there are no wrappers."""
    while not torch.compiler.is_dynamo_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def layers(x: Tensor) -> list[Tensor]:
    """The tensor, and the contents of each wrapper of torch.func, the innermost last."""
    found = [x]
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        found.append(x)
    return found


def memory_of(x: Tensor) -> int | None:
    """A number that all views of one tensor share; None for a tensor without memory, or of another layout."""
    if x.layout is not torch.strided or x.is_nested or x._is_zerotensor():
        return None
    try:
        return x.untyped_storage()._cdata
    except NotImplementedError:  # a batch of gradients (``is_grads_batched``)
        return None


def values_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether a program may depend on their values: not in a traced graph, or one captured by CUDA."""
    if torch.compiler.is_dynamo_compiling() or values_hidden():
        return False
    for x in tensors:
        if type(x) not in PLAIN:
            x = value_of(x)
            if type(x) not in PLAIN:
                return False
        if not x.is_cpu and (x.is_meta or x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
    return True


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is infinite or nan, by their sums, which may overflow without any. Synchronizes."""
    with below_autograd():
        for x in tensors:
            x = value_of(x)
            if x.layout is not torch.strided or x.is_nested or x._is_zerotensor():
                continue
            total = x.sum(dtype=torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x.sum()
            if not cmath.isfinite(total.item()):
                return False
    return True
