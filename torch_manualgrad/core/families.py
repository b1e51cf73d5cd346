"""Families: functions in place of PyTorch's operators for one kind of tensor, put in force and taken away together.

A rule is the derivative of an operator on dense tensors. On other kinds of tensors PyTorch's operators may have no
derivative, a wrong one, or no implementation; there a function takes the place of the whole call, and autograd sees what
the function does. It is registered at that kind's own autograd key, so calls on dense tensors never meet it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from . import in_force
from .in_force import fingerprint
from .internals import release
from .lookup import Registry
from .rule import operator
from .schema import Signature, with_tensors

__all__ = ["Family", "families", "stock"]

families: Registry[Family] = Registry("family")


class _Aside(threading.local):
    depth = 0


_aside = _Aside()


class stock:
    """On this thread, calls inside the block are PyTorch's own: for functions that are made of what they replace."""

    def __enter__(self) -> None:
        _aside.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _aside.depth -= 1


class Family:
    """Functions in place of operators for the tensors of one dispatch key.

    Args:
        name: what `override` takes.
        key: the dispatch key.
        functions: operator ("aten::softmax.int") -> function with the schema's parameters; it returns NotImplemented
            where PyTorch's own is to be called.
        besides: what is to be replaced beyond operators: each call replaces it, and returns what undoes that.
    """

    def __init__(
        self,
        name: str,
        key: str,
        functions: Mapping[str, Callable[..., Any]],
        *,
        besides: Sequence[Callable[[], Callable[[], None]]] = (),
    ) -> None:
        self.name = name
        self.key = key
        self.functions = dict(functions)
        self._besides = tuple(besides)
        self._holders: list[object] = []
        self._undo: list[Callable[[], None]] = []
        self._libraries: list[torch.library.Library] = []

    def __repr__(self) -> str:
        return f"<Family {self.name}: {len(self.functions)} operators at {self.key}>"

    @functools.cached_property
    def fingerprint(self) -> str:
        return " ".join(fingerprint(f) for f in self.functions.values())

    def put(self, holder: object) -> None:
        """In force until `holder` drops it; with several holders, until the last does."""
        if not self._holders:
            if not self._libraries:
                self._register()
            self._undo = [replace() for replace in self._besides]
        self._holders.append(holder)
        in_force.put(f"family {self.name}", self.name, self.fingerprint)

    def drop(self, holder: object) -> None:
        """Take back one `put`; what is registered goes away if no other thread may be inside of it."""
        held = [h for h in self._holders if h is not holder]
        if len(held) == len(self._holders):
            return
        self._holders = held
        if held:
            return
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        in_force.put(f"family {self.name}", "")
        if threading.active_count() == 1:  # else it passes calls on, until the next time
            for library in self._libraries:
                release(library)
            self._libraries = []

    def _register(self) -> None:
        with warnings.catch_warnings():  # PyTorch says once a process that a kernel is overridden: that is the point
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            made: dict[str, torch.library.Library] = {}
            for name, function in self.functions.items():
                namespace, _, short = name.partition("::")
                if namespace not in made:
                    made[namespace] = torch.library.Library(namespace, "IMPL")
                made[namespace].impl(
                    short, self._kernel(name, function), self.key, with_keyset=True, allow_override=True
                )
            self._libraries = list(made.values())

    def _kernel(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own = torch.library.get_kernel(name, self.key)

        @functools.wraps(function)
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if self._holders and not _aside.depth:
                found = function(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            signature = _signature(name)
            if len(signature.tensor_like) > 1:  # one of them may be a number, as in x * 2
                args, kwargs = signature.split(with_tensors(signature, signature.bind(args, kwargs)))
            return own.call_boxed(keyset, *args, **kwargs)

        return kernel


@functools.cache
def _signature(name: str) -> Signature:
    return Signature(operator(name)._schema)
