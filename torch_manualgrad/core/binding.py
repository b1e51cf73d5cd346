"""How functions are bound by the names of their parameters, and formulas under other names than their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .formula import Formula

__all__ = ["Binding", "Source", "bound_to", "parameters", "sources"]

EMPTY = inspect.Parameter.empty


class Source(NamedTuple):
    """Where the value of one parameter comes from.

    Attributes:
        name: what it is called where the function is bound; None: it is a constant.
        value: the constant, or what the parameter is where that name is unknown; `EMPTY` if it must be known.
    """

    name: str | None
    value: Any = EMPTY


class Binding:
    """A formula whose parameters go by other names, or are constants. Made by `Formula.bind`.

    Attributes:
        formula: the formula.
        renamed: its parameters, with the name, or the constant, that each is bound to.
    """

    def __init__(self, formula: Formula, renamed: Mapping[str, Any]) -> None:
        known = parameters(formula)
        for name in renamed:
            if name not in known:
                raise ValueError(
                    f"{formula.name}: bind() is given {name!r}, which is not one of its parameters {known}"
                )
        self.formula = formula
        self.renamed = dict(renamed)
        self.__name__ = formula.__name__
        self.parameter_names = [s.name for s in sources(self) if s.name is not None]

    def __call__(self, *values: Any) -> Any:
        """The formula, given the values of the names that it is bound to, in the order of its parameters."""
        given = iter(values)
        return self.formula(*[s.value if s.name is None else next(given) for s in sources(self)])

    def __repr__(self) -> str:
        renamed = [f"{p}={s}" if isinstance(s, str) else f"{p}={s!r}" for p, s in self.renamed.items()]
        return f"{self.formula.__name__}({', '.join(renamed)})"


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names to bind: those of all parameters that may be given by place.

    One that takes keywords only stays at its default, so that a lambda may carry constants.

    Raises:
        TypeError, ValueError: nothing is known of the parameters.
    """
    return [name for name, _ in _by_place(function)]


def sources(function: Callable[..., Any]) -> list[Source]:
    """Where the parameters come from, in their order."""
    if not isinstance(function, Binding):
        return [Source(name, default) for name, default in _by_place(function)]
    return [_source(name, default, function.renamed) for name, default in _by_place(function.formula)]


def _source(name: str, default: Any, renamed: Mapping[str, Any]) -> Source:
    if name not in renamed:
        return Source(name, default)
    given = renamed[name]
    return Source(given) if isinstance(given, str) else Source(None, given)


def bound_to(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function itself, with these names for its parameters."""
    made: Any = function
    made.parameter_names = list(dict.fromkeys(names))
    return function


def _by_place(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Name and default of each parameter that may be given by place."""
    if (names := getattr(function, "parameter_names", None)) is not None:
        return [(name, EMPTY) for name in names]
    plain = inspect.unwrap(function)
    if isinstance(plain, FunctionType) and not plain.__code__.co_flags & inspect.CO_VARARGS:
        # as inspect does it, at a twentieth of the time: a thousand functions are bound when the package is imported
        code, defaults = plain.__code__, plain.__defaults__ or ()
        given = (EMPTY,) * (code.co_argcount - len(defaults)) + defaults
        return list(zip(code.co_varnames, given))
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.kind is not p.KEYWORD_ONLY]
