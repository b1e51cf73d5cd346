"""Records the operators that a function calls, isolated from active modes and transforms."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .values import DispatchMode

__all__ = [
    "ReadsValues",
    "apart",
    "calls_seen",
    "constant_of",
    "fakes",
    "is_traced_to_graph",
    "outside_of_compiler",
    "tensor_without_memory",
    "value_of_constant",
]

# Raised by fake tensors if a number is read from one.
ReadsValues = DataDependentOutputException


class _ForceEager:
    """The stance "force_eager" of `torch.compiler`, which is one for the process, while a thread is inside.

    The first thread to enter sets it, and the last to leave restores it: compiled functions of others run eagerly
    meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(None, None, None)


_force_eager = _ForceEager()


@contextmanager
def outside_of_compiler() -> Iterator[None]:
    """Context manager: Dynamo compiles nothing, and compiled functions run eagerly."""
    callback = eval_frame.set_eval_frame(None)
    try:
        # Dynamo takes a second to load, and without it there is no compiled function
        with _force_eager if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        eval_frame.set_eval_frame(callback)


@contextmanager
def apart() -> Iterator[None]:
    """Outside of all modes and transforms, and not tracked by autograd."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), torch.no_grad():
        yield


@contextmanager
def fakes(real: bool = False) -> Iterator[Callable[..., Tensor]]:
    """Outside of all modes and transforms: a function that makes a fake tensor, given shape, dtype and device.

    Args:
        real: make real tensors instead of fake ones.
    """
    with apart(), torch._C.DisableTorchFunction():
        if real:
            yield torch.empty
            return
        with FakeTensorMode():
            yield lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device)


def is_traced_to_graph() -> bool:
    """Whether calls of this thread become nodes of an FX graph, below autograd."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


class _Seen(DispatchMode):
    def __init__(self, see: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, result)
        return result


def calls_seen(see: Callable[[Any, Any, Any, Any], None]) -> DispatchMode:
    """A context: ``see(operator, args, kwargs, result)`` is called for each operator that autograd has no parts of."""
    return _Seen(see)


def constant_of(x: Tensor) -> Any:
    """The value of a tensor made from numbers, even of a fake one; None if unknown."""
    return getattr(x, "constant", None) if isinstance(x, FakeTensor) else x


def value_of_constant(x: Tensor) -> Any:
    """The contents of a tensor made from numbers, even of a fake one: a number if it was one; None if unknown."""
    value = constant_of(x)
    if value is None or value.ndim:
        return value
    with _disable_current_modes():
        return value.item()


def tensor_without_memory(kind: Any, like: Tensor) -> Any:
    """A tensor of a given class, with the shape, dtype and device of another."""
    return Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)
