"""Checks for calls of formulas from outside the package; errors name the arguments.

Formulas are public operators, and pass their arguments to PyTorch kernels that do not check them. Rules and formulas
call formulas with valid arguments, and these calls are not checked. The check depends on the caller.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, arguments_of, described, explained
from .declared_arguments import NOTHING, Declared, check_declared, declared as declared_by
from .internals import is_functorch_wrapped, values_hidden
from .libraries import is_playing
from .schema import tensors_in

__all__ = ["FormulaCalls", "Requirement", "is_outside"]

Requirement = Callable[..., str]

PACKAGE = __name__.partition(".")[0]
_inside: set[str] = set()  # modules of the package that have called
_MODES = "__torch_dispatch__", "__torch_function__"
_bodies: dict[str, Callable[..., Any]] = {}


def is_outside(depth: int = 2) -> bool:
    """Whether the function that calls this one was called from outside of the package.

    Args:
        depth: of the first frame to inspect; frames of torch and of dispatch modes are skipped.
    """
    frame: FrameType | None = sys._getframe()
    for _ in range(depth):
        frame = frame and frame.f_back
    while frame is not None:  # may be None at once: a thread of the engine has no Python frames
        name = frame.f_globals.get("__name__", "")
        if name in _inside:
            return False
        top = name.partition(".")[0]
        if top == PACKAGE:
            _inside.add(name)
            return False
        # a mode that intercepts calls and runs them is not the caller
        if top != "torch" and frame.f_code.co_name not in _MODES:
            break
        frame = frame.f_back
    return not is_playing()


class FormulaCalls:
    """Calls of one formula from outside.

    Args:
        name: of the operator.
        function: its body.
        requires: a check that its docstring cannot declare; see `formula`.
    """

    def __init__(self, name: str, function: Callable[..., Any], requires: Requirement | None) -> None:
        self.name = name
        self.requires = requires
        self._function = function
        if function.__module__.partition(".")[0] == PACKAGE:
            _bodies.setdefault(function.__name__, function)

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @functools.cached_property
    def declared(self) -> Mapping[str, Declared]:
        """The declarations of the docstring, by argument."""
        # docstrings of other packages declare nothing
        return _declared_of(self._function.__name__) if _bodies.get(self._function.__name__) is self._function else {}

    @functools.cached_property
    def _types(self) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        return arguments_of(self._function, name=self.name)

    @functools.cached_property
    def _asked(self) -> Sequence[str]:
        """The parameters of `requires`; none if this is an overload with other arguments."""
        asked = () if self.requires is None else tuple(inspect.signature(self.requires).parameters)
        return asked if self._signature.parameters.keys() >= {*asked} else ()

    def call(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Check the arguments, and run.

        Raises:
            TypeError: an argument is missing, unknown, or of another type.
            ArgumentError: an argument cannot have this value. It is a ValueError and a RuntimeError.
        """
        values = self.check(args, kwargs)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if (better := explained(self.name, error, values)) is None:
                raise
            raise better from error

    def checking(self, run: Callable[..., Any], skipped: int = 0) -> Callable[..., Any]:
        """A dispatcher kernel that checks the arguments if the operator was called from outside.

        Args:
            run: the kernel.
            skipped: the number of values before the arguments.
        """

        def checked(*args: Any, **kwargs: Any) -> Any:
            if not is_outside():
                return run(*args, **kwargs)
            before, rest = args[:skipped], args[skipped:]
            return self.call(functools.partial(run, *before), rest, kwargs)

        return checked

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check the arguments, and return all values by their names."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; its arguments are {self._signature}") from None
        bound.apply_defaults()
        values = bound.arguments
        self._types((), {n: v for n, v in values.items() if not self._may_be_number(n, v)})
        self._check_devices(values)
        check_declared(self.name, self.declared, values)
        tensors = list(tensors_in(values.values()))
        if self.requires is None or not self._asked or any(map(_is_abstract, tensors)) or values_hidden():
            return values
        try:
            wrong = self.requires(*[values[n] for n in self._asked])
        except Exception as error:
            raise explained(self.name, error, values) or error from error
        if wrong:
            raise ArgumentError(f"{self.name}: {wrong}")
        return values

    def _may_be_number(self, name: str, value: Any) -> bool:
        if value is not None and not isinstance(value, (int, float, complex)):
            return False
        this = self.declared.get(name, NOTHING)
        return this.number or (this.complex and value is not None)

    def _check_devices(self, values: Mapping[str, Any]) -> None:
        """Refuse tensors on several devices: with a meta tensor among others PyTorch returns uninitialized memory."""
        found: list[tuple[str, Tensor]] = []
        for name, value in values.items():
            for x in tensors_in((value,)):
                if x.is_nested:
                    raise TypeError(f"{self.name}: {name}: expected a Tensor that is not nested, got {described(x)}")
                if not self.declared.get(name, NOTHING).anywhere:
                    found.append((name, x))
        if any(x.is_meta for _, x in found):
            found.sort(key=lambda named: not named[1].is_meta)
        else:  # as in PyTorch, a number may be on the CPU
            found = [named for named in found if named[1].dim() or named[1].device.type != "cpu"]
        for name, x in found[1:]:
            if x.device != found[0][1].device:
                raise ArgumentError(
                    f"{self.name}: {name}: expected a tensor on {found[0][1].device}, where {found[0][0]} is, "
                    f"got one on {x.device}"
                )


@functools.cache
def _declared_of(name: str) -> Mapping[str, Declared]:
    body = _bodies.get(name)
    return {} if body is None else declared_by(body, _declared_of)


def _is_abstract(x: Tensor) -> bool:
    """Whether its values cannot be read here."""
    return x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter) or is_functorch_wrapped(x)
