"""Checks the arguments of public functions against their annotations; an error names the argument and its value."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

__all__ = ["ArgumentError", "Check", "arguments_of", "checked", "described", "explain", "explained", "named", "naming"]

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[tuple[Any, ...], dict[str, Any]], None]


class ArgumentError(ValueError, RuntimeError):
    """A value that an argument cannot have. PyTorch raises a RuntimeError for such values, Python a ValueError."""


# Errors that stay of their type. Others of Python's own, such as an AttributeError, become an ArgumentError.
_KEPT = (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError, ArgumentError, LinAlgError)


def explained(
    name: str, error: Exception, values: Mapping[str, Any], kept: tuple[type[Exception], ...] = ()
) -> Exception | None:
    """An error that a call ended in, with the call's arguments.

    Args:
        name: of the function.
        error: what PyTorch or Python raised.
        values: by the names of the arguments.
        kept: further types of errors that stay as they are.

    Returns:
        The error to raise; None if this one names an argument already, or is of a type of its own.
    """
    text, kind = str(error), type(error)
    named = any(re.search(rf"(?<!\w){re.escape(n)}(?!\w)", text) for n in values)
    if kind is IndexError and named:  # of an index, or a dim
        return None
    if kind not in _KEPT:
        if kind.__module__ != "builtins" or kind in kept:  # of a compiler that traces the call, say
            return None
        kind, text = ArgumentError, f"{kind.__name__}: {text}"
    elif isinstance(error, ArgumentError) or "INTERNAL ASSERT" not in text and named:
        return None
    given = ", ".join(f"{n}={described(v)}" for n, v in values.items())
    first = text.strip().splitlines()[0] if text.strip() else kind.__name__
    return kind(f"{name}: {first.replace('INTERNAL ASSERT FAILED', 'assertion failed')}\nThe arguments: {given}")


def explain(error: Exception, text: str) -> None:
    """Say in the message of ``error`` what it means here; its type stays, which the compiler may go by."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def naming(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a public function; an error that names no argument gets all of them."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        names = _positional(function)
        values = {**dict(zip(names, args)), **kwargs}
        for p in inspect.signature(function).parameters.values():
            if p.kind is p.VAR_POSITIONAL:
                values[p.name] = args[len(names) :]
        if (better := explained(function.__name__, error, values, (IndexError, KeyError))) is None:
            raise
        raise better from error


def _positional(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that positional arguments fill."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def described(value: Any) -> str:
    """A value as errors show it: a tensor by its shape and dtype, anything else as Python writes it."""
    if isinstance(value, Tensor):
        if value.is_nested and value.layout is torch.strided:  # which has no shape
            return f"a nested {type(value).__name__} of {value.dim()} dims and {value.dtype}"
        return f"a {type(value).__name__} of shape {list(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


# As torch reads them: True is no int, but it is a number.
def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real))


def _is_complex(value: Any) -> bool:
    return _is_float(value) or isinstance(value, (complex, numbers.Complex))


_NUMBERS: dict[Any, tuple[str, tuple[type, ...], Callable[[Any], bool]]] = {
    int: ("an int", (int,), _is_int),
    float: ("a real number", (int, float), _is_float),
    complex: ("a number", (int, float, complex), _is_complex),
}


_CONTAINERS = {
    collections.abc.Iterable: "something that can be iterated over",
    collections.abc.Mapping: "a dictionary",
    dict: "a dictionary",
    tuple: "a tuple",
}


class _Expected:
    """The values that an annotation admits.

    Attributes:
        text: in words.
        exact: types whose values are admitted without a further look.
        admits: whether a value is.
        choices: whether it is a choice among strings.
    """

    def __init__(
        self, text: str, exact: tuple[type, ...], admits: Callable[[Any], bool], choices: bool = False
    ) -> None:
        self.text, self.exact, self.admits, self.choices = text, exact, admits, choices


def _expected(hint: Any, words: Mapping[Any, str]) -> _Expected:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _Expected(
            " or ".join(map(repr, inner)), (), lambda value: isinstance(value, str) and value in inner, True
        )
    if origin in (typing.Union, types.UnionType):
        parts = [_expected(part, words) for part in inner]
        texts = [part.text for part in parts]
        return _Expected(
            " or ".join([", ".join(texts[:-1]), texts[-1]]),
            tuple(t for part in parts for t in part.exact),
            lambda value: any(part.admits(value) for part in parts),
            any(part.choices for part in parts),
        )
    if origin is collections.abc.Sequence:
        entry = _expected(inner[0], words)
        return _Expected(
            f"a list or tuple, each entry {entry.text}",
            (),
            lambda value: isinstance(value, (list, tuple)) and all(map(entry.admits, value)),
        )
    if origin in _CONTAINERS:
        return _Expected(_CONTAINERS[origin], (), lambda value: isinstance(value, origin))
    if origin is collections.abc.Callable:
        return _Expected("a function", (), callable)
    if hint in _NUMBERS:
        return _Expected(*_NUMBERS[hint])
    if hint is type(None):
        return _Expected("None", (hint,), lambda value: value is None)
    name = hint.__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return _Expected(words.get(hint, f"{article} {name}"), (hint,), lambda value: isinstance(value, hint))


def arguments_of(
    function: Callable[..., Any], words: Mapping[Any, str] = types.MappingProxyType({}), name: str = ""
) -> Check:
    """Make the check of a call's arguments by the function's annotations: ``(args, kwargs) -> None``.

    The annotations are read at the first call. Numbers are as torch reads them: ``int`` admits no bool and no tensor,
    ``float`` admits ints and bools. A Sequence is a list or tuple. ``Any``, and what has no annotation, is not looked
    at. Missing, unknown and repeated arguments are left to the call. It is not for a graph: the compiler does not
    follow it.

    Args:
        function: whose annotations are read.
        words: what errors call a class.
        name: what errors call the function; its own name if empty.

    Returns:
        The check: ``(args, kwargs) -> None``.

    Raises:
        TypeError: on checking: an argument that is not admitted. ArgumentError: a string that is not one of a
            Literal's.
    """

    @functools.cache
    def read() -> tuple[list[tuple[str, _Expected | None]], dict[str, _Expected]]:
        """The admitted values of the arguments, in their order and by their names."""
        hints = typing.get_type_hints(function)
        expected = {
            name: _expected(hints[name], words)
            for name, parameter in inspect.signature(function).parameters.items()
            if hints.get(name, Any) is not Any
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        return [(name, expected.get(name)) for name in _positional(function)], expected

    called = name or function.__name__

    def look(argument: str, allowed: _Expected | None, value: Any) -> None:
        if allowed is not None and type(value) not in allowed.exact and not allowed.admits(value):
            error = ArgumentError if isinstance(value, str) and allowed.choices else TypeError
            raise error(f"{called}: {argument}: expected {allowed.text}, got {described(value)}")

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        in_order, expected = read()
        for (name, allowed), value in zip(in_order, args):
            look(name, allowed, value)
        for name, value in kwargs.items():
            look(name, expected.get(name), value)

    return check


def named(name: str) -> Callable[[F], F]:
    """Let the errors of a function that a public function returns name its arguments, as those of `checked` do.

    Args:
        name: what errors call it.

    Returns:
        A decorator.
    """

    def decorate(function: F) -> F:
        function.__name__ = name

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return naming(function, args, kwargs)

        return typing.cast(F, call)

    return decorate


def checked(function: F) -> F:
    """Let a function check its arguments by its annotations, as `arguments_of` says.

    Args:
        function: with annotations.

    Returns:
        The function with the checks before it; in a graph there are none.
    """
    check = arguments_of(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        check(args, kwargs)
        return naming(function, args, kwargs)

    return typing.cast(F, call)
