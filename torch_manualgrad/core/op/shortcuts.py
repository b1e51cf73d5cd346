"""Fast calls of custom ops: untracked ones and those in recordings without Python, tracked ones without the dispatcher."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.derivative import Derivative
from ..engine.node import functions, picker
from ..internals import PLAIN, in_function_mode, is_functorch_wrapped, nothing_above_autograd, only_autograd
from ..libraries import calls_library, checked
from ..schema import Signature

__all__ = ["CallsInLibrary", "tables", "tracked_call", "untracked_calls"]

# Defines the table of a derivative in the library, and returns its number. Set by override/compiled_calls.py.
tables: list[Callable[[Any], int]] = []


class CallsInLibrary:
    """The kernel of csrc/calls/custom.h that covers an op's Python kernel, if the library is loaded.

    Args:
        op: the ``OpOverload``, whose Python kernel is already registered.
        signature: of the op; with lists of tensors, Python handles all its calls.
        only_recorded: whether it handles only calls in recordings (csrc/calls/recorded.h).
    """

    def __init__(self, op: Any, signature: Signature, only_recorded: bool) -> None:
        self._number: int | None = None
        self._tracked: Derivative | None = None
        if calls_library is not None and not signature.lists:
            names = op._schema.name.encode(), op._schema.overload_name.encode()
            attach = calls_library.manualgrad_calls_custom_attach
            self._number = checked(attach(*names, ctypes.c_int64(only_recorded)))

    def act(self, yes: bool, batched: bool) -> None:
        """Switch the kernel on or off; it starts off. Python handles tracked calls until `track` is called.

        Args:
            yes: on or off.
            batched: the same for the kernel of batches, which replays the calls of the reference.
        """
        if self._number is not None:
            self._tracked = None
            checked(
                calls_library.manualgrad_calls_custom_act(
                    ctypes.c_int64(self._number), ctypes.c_int64(yes), ctypes.c_int64(batched)
                )
            )

    def track(self, derivative: Derivative) -> None:
        """Use this derivative for tracked calls, and for calls at levels of torch.func with tangents."""
        if self._number is not None and self._tracked is not derivative and tables:
            number = tables[0](derivative)
            self._tracked = derivative
            if number:
                track = calls_library.manualgrad_calls_custom_track
                checked(track(ctypes.c_int64(self._number), ctypes.c_int64(number)))

    def detach(self) -> None:
        """Unregister the kernel. A call in flight crashes."""
        if self._number is not None:
            checked(calls_library.manualgrad_calls_custom_detach(ctypes.c_int64(self._number)))
            self._number = None


def untracked_calls() -> int:
    """The number of calls that these kernels handled on this thread; 0 without the library. For tests."""
    return 0 if calls_library is None else calls_library.manualgrad_calls_custom_count()


# Type of a schema -> Python types that the dispatcher passes on unchanged.
_EXACT = {"Tensor": PLAIN, "float": (float,), "int": (int,), "bool": (bool,), "str": (str,)}


def tracked_call(derivative: Derivative) -> Callable[[Sequence[Any]], Any] | None:
    """Make a function for plain calls that autograd tracks: it calls the op's kernel at Autograd directly.

    Args:
        derivative: of the op.

    Returns:
        A function of the positional arguments. It returns the op's result with the derivative attached, or
        NotImplemented if the call must go through the dispatcher. None if the op has no such fast path.
    """
    signature = derivative.signature
    exact = [_exact(str(a.type)) for a in signature.schema.arguments]
    one_tensor = len(signature.returns) == 1 and signature.returns[0].is_tensor
    if not one_tensor or not all(derivative.differentiable) or None in exact:
        return None
    count, places = len(exact), signature.tensor_like
    tensors: list[Any] = [(i, exact[i]) for i in places]
    others: list[Any] = [(i, kinds) for i, kinds in enumerate(exact) if i not in places]
    least = sum(not a.has_default for a in signature.arguments)
    most, defaults, among = signature.positional, signature.defaults, picker(places)
    made = functions(derivative)

    def call(args: Sequence[Any]) -> Any:
        n = len(args)
        if n < count:
            if n < least:
                return NotImplemented
            args = (*args, *defaults[n:])
        if n > most or not torch.is_grad_enabled() or in_function_mode():
            return NotImplemented
        tracked = False
        for i, kinds in tensors:
            x = args[i]
            if type(x) not in kinds:
                return NotImplemented
            if x is not None:
                if is_functorch_wrapped(x):
                    return NotImplemented
                tracked = tracked or x.requires_grad
        for i, kinds in others:
            if type(args[i]) not in kinds:
                return NotImplemented
        if not tracked or not only_autograd() or not nothing_above_autograd():
            return NotImplemented
        return made.plain(args, *among(args))

    return call


def _exact(type_: str) -> tuple[type, ...] | None:
    if type_.startswith("Optional[") and (found := _EXACT.get(type_[9:-1])) is not None:
        return (*found, type(None))
    return _EXACT.get(type_)
