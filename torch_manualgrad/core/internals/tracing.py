"""Records the operators that a function calls, isolated from active modes and transforms."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "eager_where",
    "fakes",
    "is_traced_to_graph",
    "outside_of_compiler",
    "tensor_without_memory",
    "value_of_constant",
]

# Raised by fake tensors if a number is read from one.
ReadsValues = DataDependentOutputException


class _EagerOnThreads:
    """The stance "force_eager" of `torch.compiler` on the threads of `eager_where`; on others, the stance before.

    ``torch.compiler.set_stance`` is for all threads. Another thread's call of a compiled function would then run uncompiled,
    and raise with ``fullgraph=True`` if the stance is restored meanwhile: no frame of it was compiled.
    """

    lock = threading.Lock()
    conditions: list[Callable[[], bool]] = []

    def __init__(self, others: Any) -> None:
        self.others = others

    def __getattr__(self, name: str) -> Any:
        if name == "stance" and any(is_inside() for is_inside in [*self.conditions]):
            return "force_eager"
        return getattr(self.others, name)

    @classmethod
    def update(cls) -> None:
        """Put itself in the place of the stance if there is a condition, and take itself away if there is none."""
        frames: Any = sys.modules.get(
            "torch._dynamo.eval_frame"
        )  # takes a second to load; without it, nothing is compiled
        if frames is not None and isinstance(frames._stance, cls) != bool(cls.conditions):
            frames._stance = cls(frames._stance) if cls.conditions else frames._stance.others


@contextmanager
def eager_where(is_inside: Callable[[], bool]) -> Iterator[None]:
    """Context manager: compiled functions run eagerly on each thread where ``is_inside()``, unless Dynamo is imported later."""
    eager = _EagerOnThreads
    with eager.lock:
        eager.conditions.append(is_inside)
        eager.update()
    try:
        yield
    finally:
        with eager.lock:
            eager.conditions.remove(is_inside)
            eager.update()


@contextmanager
def outside_of_compiler() -> Iterator[None]:
    """Context manager: Dynamo compiles nothing, and compiled functions run eagerly."""
    callback, thread = eval_frame.set_eval_frame(None), threading.get_ident()
    try:
        with eager_where(lambda: threading.get_ident() == thread):
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
