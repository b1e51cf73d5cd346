"""Finds the formulas that a function calls, by reading its code: no list beside the code has to be kept true."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .binding import Binding
from .formula import Formula
from .internals import custom_op_overload
from .op_registry import defined

__all__ = ["called_formulas"]

_CORE = __package__


def called_formulas(functions: Iterable[Callable[..., Any] | None]) -> tuple[Formula, ...]:
    """The formulas that the functions are, bind or call, in the order in which they are found.

    Follows the names that the code of a function reads, its closures, defaults and wrapped functions, through helper
    functions and tables, and stops at a formula: a formula's own calls are its own. A formula that is reached by a name
    made at run time (``getattr``) is not found.

    Args:
        functions: functions, formulas, bindings or partial functions; None is skipped.

    Returns:
        Each formula once.
    """
    found: dict[Formula, None] = {}
    seen: dict[int, Any] = {}  # by identity; a value that is kept alive keeps its identity
    waiting = [f for f in reversed([*functions]) if f is not None]
    while waiting:
        value = waiting.pop()
        if (formula := _formula(value)) is not None:
            found[formula] = None
        elif id(value) not in seen:
            seen[id(value)] = value
            waiting += reversed([*_referenced(value)])
    return tuple(found)


def _formula(value: Any) -> Formula | None:
    """The formula that a value is, or whose operator it is."""
    overload = None if isinstance(value, Formula) else custom_op_overload(value)
    op = value if overload is None else defined(overload.name())
    return op if isinstance(op, Formula) else None


def _referenced(value: Any) -> Iterator[Any]:
    """What a function, or a table of functions, refers to."""
    if isinstance(value, Binding):
        yield value.formula
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif inspect.ismethod(value):
        yield value.__func__
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if (wrapped := getattr(value, "__wrapped__", None)) is not None:
            yield wrapped
        if _is_derivative_code(value):
            yield from _named(value.__code__, value.__globals__)


def _is_derivative_code(function: FunctionType) -> bool:
    """Not the machinery that every rule shares: its names would be found for each rule."""
    module = function.__module__ or ""
    return module.split(".")[0] != "torch" and not module.startswith(f"{_CORE}.")


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that code reads, nested functions included, and what it reads of a module."""
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] != "torch":
                yield from (vars(value)[n] for n in code.co_names if n in vars(value))
        else:
            yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
