"""Dual levels: a dispatcher key above autograd at which a thread sees every call, and the storages of tensors."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils import _pytree as pytree

from .functorch import count_own_levels, in_functorch
from .tracing import eager_where

__all__ = [
    "accumulating",
    "below_levels",
    "counted",
    "decomposed",
    "fwd_grad_is_enabled",
    "has_autograd_kernel",
    "intercept",
    "intercepting",
    "neg_view",
    "on_this_thread",
    "packing_later",
    "put_on_this_thread",
    "storage_of",
]

# A mode key of the dispatcher without PyTorch kernels: above functorch and autograd, and on for a thread only inside of
# `intercepting`.
_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_NAME)
_KEYSET = torch._C.DispatchKeySet(_KEY)
_libraries: list[torch.library.Library] = []
_lock = threading.Lock()


def intercept(handler: Callable[..., Any]) -> None:
    """Let ``handler(op, *args, **kwargs)`` receive every operator call inside of `intercepting`."""
    with _lock:
        if not _libraries:
            _libraries.extend(_registered(handler))


def _registered(handler: Callable[..., Any]) -> list[torch.library.Library]:
    everywhere, spaces = torch.library.Library("_", "IMPL"), {}
    # PyTorch finds no fallback in Python for a call on a tensor subclass, or under a dispatch mode: so one kernel for each
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space not in ("aten", "prims", "manualgrad"):
            continue
        if space not in spaces:
            spaces[space] = torch.library.Library(space, "IMPL")
        # ``x.as_subclass(...)`` makes an object of alias's result, but a handler's result already is one
        kernel = torch.library.fallthrough_kernel if name == "alias" else _Kernel(handler, full)
        spaces[space].m.impl(name, _NAME, kernel, False)  # type: ignore[union-attr]
    everywhere.fallback(handler, _NAME)
    return [everywhere, *spaces.values()]


class _Kernel:
    """The handler for one operator, looked up at its first call."""

    __slots__ = ("full", "handler", "op")

    def __init__(self, handler: Callable[..., Any], full: str) -> None:
        self.handler, self.full, self.op = handler, full, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.op is None:
            space, _, rest = self.full.partition("::")
            name, _, overload = rest.partition(".")
            self.op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        return self.handler(self.op, *args, **kwargs)


def intercepting() -> Any:
    """A guard that intercepts the calls of this thread, and of autograd's threads that work for it."""
    return torch._C._IncludeDispatchKeyGuard(_KEY)


def below_levels() -> Any:
    """A guard without interception."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYSET)


class _Saved:
    """A tensor saved by autograd: itself, until the user's hook has packed it."""

    __slots__ = ("tensor", "value")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.value: Any = None


@contextmanager
def packing_later(around: Callable[[], Any]) -> Iterator[None]:
    """A block at whose end the hooks on saved tensors pack the tensors saved in it, each inside of ``around()``.

    A result receives its tangents after the operator has returned, but autograd saves it earlier.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if torch.is_grad_enabled() else None
    if hooks is None or hasattr(hooks[0], "packs_later"):
        yield
        return
    pack, unpack = hooks
    saved: list[_Saved] = []

    def record(x: Tensor) -> _Saved:
        saved.append(_Saved(x))
        return saved[-1]

    def restore(box: _Saved) -> Tensor:
        return unpack(box.value) if box.tensor is None else box.tensor

    record.packs_later = True  # type: ignore[attr-defined]
    with torch.autograd.graph.saved_tensors_hooks(record, restore):
        yield
    with around():
        for box in saved:
            x, box.tensor = box.tensor, None
            box.value = pack(x)  # type: ignore[arg-type]


def decomposed(op: Any, args: Any, kwargs: Any) -> Any:
    """Decompose a composite operator, in C++ if it is written there. Autocast may cast its arguments first."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if torch._C._is_any_autocast_enabled():
        key = _autocast_key(op, args, kwargs) or key
    return op._op_dk(key, *args, **kwargs)


def _autocast_key(op: Any, args: Any, kwargs: Any) -> Any:
    """The dispatch key of autocast's kernel for this call; None if there is none, or if it has already run."""
    device = next((x.device.type for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "")
    name = f"Autocast{device.upper()}"
    if device not in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") or not torch.is_autocast_enabled(device):
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), name):
        return None
    key = torch._C._dispatch_key_parse(name)
    return None if torch._C._dispatch_tls_local_exclude_set().has(key) else key


# State that autograd passes on to the threads of its devices, like keys.
_SLOT = "torch_manualgrad.forward_ad"


def put_on_this_thread(state: object) -> None:
    """Keep an object for this thread, and for those of its backward passes."""
    count = sys.getrefcount(state)
    torch._C._stash_obj_in_tls(_SLOT, state)
    if sys.getrefcount(state) == count:  # it drops a reference at the end; some releases do not take one first
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))


def on_this_thread() -> Any:
    """The last argument of `put_on_this_thread`; None without one."""
    return torch._C._get_obj_in_tls(_SLOT) if torch._C._is_key_in_tls(_SLOT) else None


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of ``x``, the same Python object while it lives; None if it has none (sparse, a wrapper)."""
    if in_functorch():
        while _functorch.is_functorch_wrapped_tensor(x):
            x = _functorch.get_unwrapped(x)
    if x.layout is not torch.strided:
        return None
    try:
        return torch._C.TensorBase.untyped_storage(x)
    except (NotImplementedError, RuntimeError):
        return None


# The view whose values are the negative of those in memory.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view


def accumulating() -> bool:
    """Whether autograd is adding a gradient, which it detaches first, to ``x.grad`` on this thread."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


# False inside of the forward of an autograd.Function, and in inference mode.
fwd_grad_is_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled


def has_autograd_kernel(op: Any) -> bool:
    """Whether PyTorch has a derivative of the operator, or an error for it, and not the fallback without one."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Autograd")


_levels_open = 0


@contextmanager
def counted(is_inside: Callable[[], bool]) -> Iterator[None]:
    """A block in which a level is open.

    Compiled functions, whose kernels are not operators, run eagerly on each thread where ``is_inside()``.
    """
    global _levels_open
    with _lock:
        _levels_open += 1
        count_own_levels(1)
        torch.Tensor._make_subclass = _make_subclass  # type: ignore[method-assign]
    try:
        with eager_where(is_inside):
            yield
    finally:
        with _lock:
            _levels_open -= 1
            count_own_levels(-1)
            if not _levels_open:
                del torch.Tensor._make_subclass  # PyTorch's own is that of the base class


@staticmethod  # type: ignore[misc]
def _make_subclass(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's method that makes parameters: it cannot make them from the result of a handler of ``detach``."""
    with below_levels():
        return torch._C.TensorBase._make_subclass(*args, **kwargs)
