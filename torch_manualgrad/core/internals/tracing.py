"""Records the operators that a function calls, isolated from active modes and transforms."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    "eager_on_this_thread",
    "fakes",
    "is_traced_to_graph",
    "outside_of_compiler",
    "tensor_without_memory",
    "value_of_constant",
]

# Raised by fake tensors if a number is read from one.
ReadsValues = DataDependentOutputException


class _EagerHere:
    """The stance "force_eager" of `torch.compiler` on the threads that are inside; on others, the stance before.

    ``torch.compiler.set_stance`` is for all threads. Another thread's call of a compiled function would then run uncompiled,
    and raise with ``fullgraph=True`` if the stance is restored meanwhile: no frame of it was compiled.
    """

    _lock = threading.Lock()
    _inside = 0  # of all threads
    _here = threading.local()

    def __init__(self, others: Any) -> None:
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return "force_eager" if name == "stance" and self._depth() else getattr(self._others, name)

    @classmethod
    def _depth(cls) -> int:
        return getattr(cls._here, "depth", 0)

    @classmethod
    @contextmanager
    def entered(cls) -> Iterator[None]:
        frames: Any = sys.modules["torch._dynamo.eval_frame"]
        with cls._lock:
            cls._inside += 1
            if not isinstance(frames._stance, cls):
                frames._stance = cls(frames._stance)
        cls._here.depth = cls._depth() + 1
        try:
            yield
        finally:
            cls._here.depth -= 1
            with cls._lock:
                cls._inside -= 1
                if not cls._inside and isinstance(frames._stance, cls):
                    frames._stance = frames._stance._others


def eager_on_this_thread() -> AbstractContextManager[None]:
    """Context manager: compiled functions that this thread calls run eagerly. Compiling raises if it imports Dynamo here."""
    # Dynamo takes a second to load, and without it there is no compiled function
    return _EagerHere.entered() if "torch._dynamo.eval_frame" in sys.modules else nullcontext()


@contextmanager
def outside_of_compiler() -> Iterator[None]:
    """Context manager: Dynamo compiles nothing, and compiled functions run eagerly."""
    callback = eval_frame.set_eval_frame(None)
    try:
        with eager_on_this_thread():
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
