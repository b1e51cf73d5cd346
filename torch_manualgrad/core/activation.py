"""The active handles: one tuple, replaced by one assignment.

A signal handler may raise between any two lines of Python, and a fork may copy this process in the middle of a change.
So changes are atomic: everything before the assignment can be discarded, and everything after it is computed from the
tuple by functions that can run again (`following`). The next change repairs the effects of an interrupt.

The step itself is in C++ (csrc/calls/block.cpp) if that library is loaded: Python runs signal handlers between
bytecodes, also between the end of a ``with`` block and the first line of an ``__exit__`` in Python.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .libraries import calls_library
from .once import refuse_reload

__all__ = ["ActiveHandle", "Block", "activate", "deactivate", "following", "in_library", "lock", "settle", "truth"]

refuse_reload(globals())

F = TypeVar("F", bound=Callable[[], Any])

lock = threading.RLock()  # held while registrations change; calls do not take it


def _after_fork() -> None:
    global lock
    lock = threading.RLock()  # another thread of the parent may have held it, and cannot release it here


os.register_at_fork(after_in_child=_after_fork)


class ActiveHandle:
    """A handle that can be activated.

    Attributes:
        number: of its layer in the library of calls.
        thread: the identifier of its thread; 0 for the process.
        abandoned: whether it is no longer active, although it may still be in the tuple.
        packs_on: the identifier of the thread whose saved tensors it packs; 0 if it packs none.
    """

    number = 0
    thread = 0
    abandoned = False
    packs_on = 0


class _Truth:
    __slots__ = ("entries",)
    entries: tuple[Any, ...]


truth = _Truth()
truth.entries = ()

scoped = False  # whether a handle was ever activated for a single thread

_following: list[Callable[[], Any]] = []


def following(function: F) -> F:
    """Register a function that runs after each change. It may run again at any time."""
    _following.append(function)
    return function


def settle() -> None:
    """Run the functions that follow from the active handles."""
    for function in _following:
        function()


class _Block:
    """A block whose handle is active inside. Subclasses have `_prepare`, which returns the handle, and `_entered`."""

    _entered: list[Any]

    def _prepare(self) -> Any:
        raise NotImplementedError

    def _not_entered(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        handle = self._prepare()
        try:
            self._entered.append(handle)
            _activate(handle)
        except BaseException:
            handle.abandoned = True
            _deactivate(handle)
            raise
        return handle

    def __exit__(self, *exception: object) -> None:
        if not self._entered:
            self._not_entered()
        try:
            handle = self._entered[-1]
            handle.abandoned = True
            self._entered.remove(handle)
            _deactivate(handle)
        except BaseException:
            settle()
            raise

    def __del__(self) -> None:
        # An `__exit__` interrupted by a signal before its first line is not called again.
        for handle in self.__dict__.get("_entered", ()):
            handle.abandoned = True


def _exchange(without: Any, added: tuple[Any, ...]) -> None:
    with lock:
        kept = [h for h in truth.entries if h is not without and not h.abandoned]
        truth.entries = (*kept, *added)
    settle()


def _activate(handle: Any) -> None:
    _exchange(handle, (handle,))


def _deactivate(handle: Any) -> None:
    _exchange(handle, ())


def _from_library() -> tuple[Any, Any, Any]:
    if calls_library is None or not hasattr(calls_library, "manualgrad_calls_block"):
        return _Block, _activate, _deactivate
    make = calls_library.manualgrad_calls_block
    make.restype, make.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.py_object)
    found: tuple[Any, Any, Any] = make(truth, settle)
    return found


Block: Any
Block, activate, deactivate = _from_library()
in_library = Block is not _Block
