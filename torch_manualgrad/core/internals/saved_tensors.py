"""The default hooks on saved tensors of this thread: PyTorch has a stack, and calls only the pair on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .nodes import base_class

__all__ = [
    "HIDDEN",
    "SavedHooks",
    "follow_refusals",
    "packed_by",
    "put_saved_hooks",
    "saved_hooks_allowed",
    "saved_hooks_here",
    "take_saved_hooks",
]

SavedHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_autograd: Any = torch._C._autograd
_refuse, _allow = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable


def saved_hooks_here() -> SavedHooks | None:
    """The pair of hooks that packs tensors saved on this thread."""
    found: SavedHooks | None = _autograd._top_saved_tensors_default_hooks(True)
    return found


def saved_hooks_allowed() -> bool:
    """False inside of torch.func's transforms, which refuse hooks."""
    return _autograd._saved_tensors_hooks_get_disabled_error_message() is None


def put_saved_hooks(hooks: SavedHooks) -> None:
    """Let these hooks pack tensors saved on this thread."""
    _autograd._push_saved_tensors_default_hooks(*hooks)


def take_saved_hooks(hooks: SavedHooks) -> None:
    """Remove these hooks from this thread, wherever they are in its stack. The others keep their order."""
    above: list[SavedHooks] = []
    while (top := saved_hooks_here()) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        if top[0] is hooks[0]:
            break
        above.append(top)
    for pair in reversed(above):
        put_saved_hooks(pair)


HIDDEN = object()


def packed_by(node: Any, name: str) -> Any:
    """The hook's packed value for the tensor that a PyTorch node saves as ``name``, or the tensor if there was no hook.

    The unpack hook is not called. None: there was no tensor to save, or the node has released it. `HIDDEN`: it is not
    available without unpacking.

    PyTorch's object for a saved tensor is a bare pointer into the node (pytorch/pytorch#63624). If it is read after the node
    is gone, the tensor that it returns is freed memory, and the garbage collector crashes on it later. So it does not leave
    this function, whose argument keeps the node alive.
    """
    if isinstance(node, base_class()):  # its objects for saved tensors have no C++ object to read
        return HIDDEN
    try:
        raw: Any = getattr(node, f"_raw_saved_{name}", None)
    except (IndexError, RuntimeError):  # a Python node that has not saved yet, or has released its tensors
        return HIDDEN
    return raw.data if type(raw) is _autograd.SavedTensor else HIDDEN


def follow_refusals(before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
    """Call ``before`` when torch.func refuses hooks on a thread, and ``after`` when it allows them again.

    It raises if there are hooks, so ``before`` removes the optional ones. None, None: PyTorch's behaviour.
    """
    if before is None or after is None:
        _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable = _refuse, _allow
        return

    def refuse(message: str) -> None:
        before()
        _refuse(message)

    def allow() -> None:
        _allow()
        after()

    # graphs traced by torch.compile call them by name
    for made, own in ((refuse, _refuse), (allow, _allow)):
        made.__module__, made.__name__, made.__qualname__ = "torch._C._autograd", own.__name__, own.__name__
    _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable = refuse, allow
