"""Functions in place of PyTorch's operators for one kind of tensor, switched on and off together.

A rule is the derivative of an operator on dense tensors. On other kinds of tensors PyTorch's operators may have no
derivative, a wrong one, or no implementation; there a function takes the place of the whole call, and autograd sees what
the function does. It is registered at that kind's own autograd key, so calls on dense tensors never meet it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import compile_cache
from .compile_cache import fingerprint
from .internals import forget_dispatch
from .nested_calls import NestedCalls
from .registration import Registration, Suspension, without_overrides
from .registry import Registry
from .rule import operator
from .schema import Signature

__all__ = ["Replacements", "replacements", "stock"]

replacements: Registry[Replacements] = Registry("replacement")


stock = Suspension()  # calls inside are PyTorch's own: for functions that are made of what they replace


class Replacements:
    """Functions in place of operators for the tensors of one dispatch key.

    Args:
        name: what `override` takes.
        key: the dispatch key.
        functions: operator ("aten::softmax.int") -> function with the schema's parameters; it returns NotImplemented
            where PyTorch's own is to be called.
        besides: what is to be replaced beyond operators: each call replaces it, and returns what undoes that.
        calls: the kernels in C++ that cover those of some of the functions. A call that continues what they have begun
            is ours, whatever is active.
        choose: ``(function, own, args, kwargs) -> result``, which of the function and PyTorch's own a call is given to;
            by default the function, and PyTorch's own where that returns NotImplemented.
    """

    def __init__(
        self,
        name: str,
        key: str,
        functions: Mapping[str, Callable[..., Any]],
        *,
        besides: Sequence[Callable[[], Callable[[], None]]] = (),
        calls: NestedCalls | None = None,
        choose: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.key = key
        self.functions = dict(functions)
        self._besides = tuple(besides)
        self._calls = calls or NestedCalls({})
        self._choose = choose or _function_first
        self._holders: list[object] = []
        self._undo: list[Callable[[], None]] = []
        self._registrations: list[Registration] = []

    def __repr__(self) -> str:
        return f"<Replacements {self.name}: {len(self.functions)} operators at {self.key}>"

    @functools.cached_property
    def fingerprint(self) -> str:
        return " ".join(fingerprint(f) for f in self.functions.values())

    @property
    def holder(self) -> object | None:
        """Who activated it last."""
        return self._holders[-1] if self._holders else None

    def put(self, holder: object) -> None:
        """Active until `holder` drops it; with several holders, until the last does."""
        if not self._holders:
            if not self._registrations:
                self._register()
            self._undo = [replace() for replace in self._besides]
            self._calls.act(True)
        self._holders.append(holder)
        compile_cache.put(f"replacement {self.name}", self.name, self.fingerprint)

    def drop(self, holder: object) -> None:
        """Take back one `put`. What is registered stays, and passes calls on: another thread may be inside of it."""
        held = [h for h in self._holders if h is not holder]
        if len(held) == len(self._holders):
            return
        self._holders = held
        if held:
            return
        self._calls.act(False)
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        compile_cache.put(f"replacement {self.name}", "")

    @property
    def registered(self) -> list[str]:
        """The operators whose kernels are in place now."""
        return [registration.name.removesuffix(".default") for registration in self._registrations]

    def unregister(self) -> None:
        """Take the registrations away, if nothing holds the replacement; see `torch_manualgrad.unregister`."""
        if not self._holders and self._registrations:
            self._calls.detach()
            for registration in self._registrations:
                registration.release()
                forget_dispatch(operator(registration.name))
            self._registrations = []

    def _register(self) -> None:
        made = []
        for name, function in self.functions.items():
            op = operator(name)
            registration = Registration(op, Signature(op._schema), self.key)
            self._calls.before(op)
            registration.register(self._kernel(function, registration.stock))
            self._calls.attach(op)
            forget_dispatch(op)
            made.append(registration)
        self._calls.attach_buffers()
        self._registrations = made

    def _acts(self) -> bool:
        return not (stock.depth or without_overrides.depth) and (bool(self._holders) or self._calls.continue_here())

    def _kernel(self, function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if self._acts():
                return self._choose(function, functools.partial(own, keyset), args, kwargs)
            return own(keyset, *args, **kwargs)

        return kernel


def _function_first(function: Callable[..., Any], own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    found = function(*args, **kwargs)
    return own(*args, **kwargs) if found is NotImplemented else found
