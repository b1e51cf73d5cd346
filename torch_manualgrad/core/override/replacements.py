"""Functions that replace PyTorch's operators for one kind of tensor, switched on and off together.

A rule is the derivative of an operator on dense tensors. On other kinds of tensors PyTorch's operators may have no
derivative, a wrong one, or no implementation; there a function replaces the whole call, and autograd sees its
operators. It is registered at that kind's own autograd key, so calls on dense tensors never reach it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import activation
from ..compile_cache import fingerprint
from ..internals import forget_dispatch
from ..registry import Registry
from ..rule.definition import operator
from ..schema import Signature
from .compiled_nested import NestedCalls
from .kernels import Registration, Suspension, without_overrides
from .state import here

__all__ = ["Replacements", "replacements", "stock"]

replacements: Registry[Replacements] = Registry("replacement")


stock = Suspension()  # calls inside are PyTorch's own: for functions that call the operators they replace


class Replacements:
    """Functions that replace operators for the tensors of one dispatch key.

    Args:
        name: for `override`.
        key: the dispatch key.
        functions: operator ("aten::softmax.int") -> function with the schema's parameters; it returns NotImplemented
            to leave the call to PyTorch.
        besides: replacements beyond operators: ``switch(acts, yes)`` replaces, or restores, and may be called again;
            ``acts()`` returns whether the replacement is active on this thread.
        calls: the C++ kernels that cover those of some functions. A call that continues one of theirs is ours, whatever
            is active.
        choose: ``(function, own, args, kwargs) -> result``, calls the function or PyTorch's own; by default the
            function, then PyTorch's own if that returns NotImplemented.
    """

    def __init__(
        self,
        name: str,
        key: str,
        functions: Mapping[str, Callable[..., Any]],
        *,
        besides: Sequence[Callable[[Callable[[], bool], bool], None]] = (),
        calls: NestedCalls | None = None,
        choose: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.key = key
        self.functions = dict(functions)
        self._besides = tuple(besides)
        self._calls = calls or NestedCalls({})
        self._choose = choose or _function_first
        self._switched = False  # `besides`
        self._complete = False  # all kernels are in place
        self._registrations: list[Registration] = []

    def __repr__(self) -> str:
        return f"<Replacements {self.name}: {len(self.functions)} operators at {self.key}>"

    @functools.cached_property
    def fingerprint(self) -> str:
        return " ".join(fingerprint(f) for f in self.functions.values())

    def ensure_registered(self) -> None:
        """Register the kernels. They forward calls until the replacement is active."""
        if not self._complete:
            self._release()  # after an interrupt
            self._register()
            self._complete = True

    def switch(self, yes: bool) -> None:
        """Switch the replacements beyond operators on or off."""
        if yes != self._switched:
            for switch in self._besides:
                switch(self._acts_in_python, yes)
            self._switched = yes

    @property
    def registered(self) -> list[str]:
        """The operators whose kernels are registered."""
        return [registration.name.removesuffix(".default") for registration in self._registrations]

    def unregister(self) -> None:
        """Undo the registrations; see `torch_manualgrad.unregister`. Not while it is active."""
        self._complete = False
        self._release()

    def _release(self) -> None:
        if self._registrations:
            self._calls.detach()
        while self._registrations:
            registration = self._registrations[-1]
            registration.release()
            forget_dispatch(operator(registration.name))
            self._registrations.pop()

    def _register(self) -> None:
        for name, function in self.functions.items():
            op = operator(name)
            registration = Registration(op, Signature(op._schema), self.key)
            self._calls.before(op)
            self._registrations.append(registration)
            registration.register(self._kernel(function, registration.stock))
            self._calls.attach(op)
            forget_dispatch(op)
        self._calls.attach_buffers()

    def _acts(self) -> bool:
        return not (stock.depth or without_overrides.depth) and (
            self in here().replacements or self._calls.continue_here()
        )

    def _acts_in_python(self) -> bool:
        return torch.compiler.is_dynamo_compiling() or self._acts()  # Dynamo would trace the check

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


@activation.following
def _switch() -> None:
    wanted = {one for handle in activation.truth.entries for one in handle.layer.replacements if not handle.abandoned}
    for one in wanted:
        one.switch(True)
    for one in [*replacements.entered(), *_switched]:
        if one not in wanted:
            one.switch(False)
    _switched[:] = wanted


_switched: list[Replacements] = []  # including unregistered ones
