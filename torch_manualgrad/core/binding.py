"""How functions are bound by the names of their parameters, and formulas under other names than their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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
        self.__signature__ = _signature([s.name for s in sources(self) if s.name is not None])

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
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]


def sources(function: Callable[..., Any]) -> list[Source]:
    """Where the parameters come from, in their order."""
    formula, renamed = (function.formula, function.renamed) if isinstance(function, Binding) else (function, {})
    return [_source(p, renamed) for p in inspect.signature(formula).parameters.values() if p.kind is not p.KEYWORD_ONLY]


def _source(parameter: inspect.Parameter, renamed: Mapping[str, Any]) -> Source:
    if parameter.name not in renamed:
        return Source(parameter.name, parameter.default)
    given = renamed[parameter.name]
    return Source(given) if isinstance(given, str) else Source(None, given)


def bound_to(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function itself, with these names for its parameters."""
    made: Any = function
    made.__signature__ = _signature(names)
    return function


def _signature(names: Sequence[str]) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in dict.fromkeys(names)])
