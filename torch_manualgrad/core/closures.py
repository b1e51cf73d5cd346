"""Copies of functions that keep the present values of their closure variables, and of the globals of scripts."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .internals import is_compiled, runs_eagerly, uncompiled

__all__ = ["Copies", "as_of_now"]


class Copies:
    """The copies of one `as_of_now`, and the variables that were read for them.

    Args:
        in_compiled: whether these are for one compiled function, with those that it calls.
    """

    __slots__ = ("_variables", "in_compiled", "made")  # without a __dict__, which `reachable` would search

    def __init__(self, in_compiled: bool = False) -> None:
        self.in_compiled = in_compiled
        self.made: dict[int, tuple[Any, Any]] = {}  # pairs of an original and its copy, by the ids of the originals
        self._variables: list[tuple[types.CellType | dict[str, Any], str, Any]] = []

    def add(self, original: Any, copy: Any) -> None:
        """Add a copy."""
        self.made[id(original)] = original, copy  # the original keeps its id

    def read(self, place: types.CellType | dict[str, Any], name: str, value: Any) -> None:
        """A variable, and its value now."""
        self._variables.append((place, name, value))

    def changed(self) -> list[str]:
        """The names of variables that have other values than when they were read."""
        return [name for place, name, value in self._variables if _value(place, name) is not value]


_NONE = object()


def _value(place: types.CellType | dict[str, Any], name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name, _NONE)
    try:
        return place.cell_contents
    except ValueError:  # not assigned yet
        return _NONE


def as_of_now(value: Any, copies: Copies | None = None) -> Any:
    """A copy of a function that keeps the present values of its closure variables, such as a loop's, and of a script's globals.

    So do the functions among these values, in partial calls, methods, defaults, tuples, lists, dictionaries, and what has a
    method of this name. A compiled function stays compiled while its variables do not change. Other values stay as they
    are: functions of other modules that are globals, attributes of objects, and variables that the function itself writes.
    A global that does not exist yet is not found later.

    Args:
        value: the function, or something else that is called.
        copies: what exists already.
    """
    copies = Copies() if copies is None else copies
    if id(value) in copies.made:
        return copies.made[id(value)][1]
    kind = type(value)
    if kind is types.FunctionType:
        return _compiled_as_of_now(value, copies) if is_compiled(value) else _function_as_of_now(value, copies)
    parts = _PARTS.get(kind)
    if parts is not None and (kind not in (list, dict) or len(value) <= _MOST):
        copies.add(value, value)  # one that contains itself keeps itself
        taken, put_together = parts
        found = taken(value)
        now = [as_of_now(x, copies) for x in found]
        if any(x is not y for x, y in zip(now, found)):
            copies.add(value, put_together(value, now))
        return copies.made[id(value)][1]
    return value.as_of_now(copies) if hasattr(kind, "as_of_now") else value


def _partial(value: functools.partial[Any], parts: Sequence[Any]) -> functools.partial[Any]:
    function, args, keywords = parts
    made = functools.partial(function, *args, **keywords)
    vars(made).update(vars(value))
    return made


# what contains functions -> its parts, and how others are put together
_PARTS: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[[Any, Sequence[Any]], Any]]] = {
    tuple: (list, lambda value, parts: tuple(parts)),
    list: (list, lambda value, parts: parts),
    dict: (lambda value: list(value.values()), lambda value, parts: dict(zip(value, parts))),
    functools.partial: (lambda value: [value.func, value.args, value.keywords], _partial),
    types.MethodType: (lambda value: [value.__func__, value.__self__], lambda value, parts: types.MethodType(*parts)),
}
_MOST = 256  # entries of a list or dictionary that is searched for functions at each call


def _compiled_as_of_now(function: types.FunctionType, copies: Copies) -> Any:
    own = copies if copies.in_compiled else Copies(in_compiled=True)

    @functools.wraps(function, updated=())
    def compiled_or_not(*args: Any, **kwargs: Any) -> Any:
        # compiled code reads variables itself, from the places where the original has them
        if runs_eagerly():
            return copy(*args, **kwargs)
        changed = own.changed()
        if not changed:
            return function(*args, **kwargs)
        before = _generator_states()
        result = copy(*args, **kwargs)
        if not all(map(torch.equal, before, _generator_states())):
            raise RuntimeError(
                f"a derivative runs the compiled function {function.__name__} again, without compilation, because the variable "
                f"{changed[0]} has changed since the call. The function draws random numbers, which would differ. Pass "
                f"{changed[0]} as an argument"
            )
        return result

    copies.add(function, compiled_or_not)
    own.add(function, compiled_or_not)
    original = uncompiled(function)
    copy = as_of_now(original, own)
    if copy is original:
        copies.add(function, function)
    return copies.made[id(function)][1]


def _generator_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _function_as_of_now(function: types.FunctionType, copies: Copies) -> types.FunctionType:
    code, given = function.__code__, function.__globals__
    written = _written(code)
    cells = function.__closure__ or ()
    is_kept = [name not in written for name in code.co_freevars]
    module_name = given.get("__name__", "")
    module = sys.modules.get(module_name)
    is_imported = module_name != "__main__" and module is not None and vars(module) is given  # and so has no loops
    read = {} if is_imported else {name: given[name] for name in _globals_of(code) if name in given}
    if all(isinstance(x, _FIXED) for x in read.values()):
        read = given
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not any(is_kept) and read is given and not any(map(_may_hold_functions, (*defaults, *named.values()))):
        return function
    closure = tuple([types.CellType() if new else cell for new, cell in zip(is_kept, cells)])
    copy = types.FunctionType(code, read, function.__name__, None, closure)
    copy.__dict__.update(function.__dict__)
    copy.__module__, copy.__doc__, copy.__annotations__ = (
        function.__module__,
        function.__doc__,
        function.__annotations__,
    )
    copies.add(function, copy)
    copy.__defaults__ = as_of_now(function.__defaults__, copies)
    copy.__kwdefaults__ = function.__kwdefaults__ and {name: as_of_now(x, copies) for name, x in named.items()}
    for variable, old, new in zip(code.co_freevars, cells, closure):
        if new is not old:
            value = _value(old, variable)
            if value is not _NONE:
                copies.read(old, variable, value)
                new.cell_contents = as_of_now(value, copies)
    if read is not given:
        for name, x in read.items():
            copies.read(given, name, x)
            if not isinstance(x, types.FunctionType) or is_compiled(x) or x.__globals__ is given:
                read[name] = as_of_now(x, copies)
        given.setdefault("__warningregistry__", {})
        read |= {name: given[name] for name in _OF_MODULES if name in given}
    return copy


def _may_hold_functions(value: Any) -> bool:
    return callable(value) or type(value) in _PARTS


_FIXED = (types.ModuleType, type, types.BuiltinFunctionType)  # globals that no program assigns in a loop
_OF_MODULES = ("__builtins__", "__name__", "__package__", "__spec__", "__loader__", "__file__", "__warningregistry__")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code reads; none if it writes some, or may read any."""
    names: dict[str, None] = {}
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return ()
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names[str(instruction.argval)] = None
    return () if names.keys() & {"globals", "eval", "exec"} else tuple(names)


@functools.lru_cache(maxsize=4096)
def _written(code: types.CodeType) -> frozenset[str]:
    """The variables of enclosing functions that code writes."""
    return frozenset(
        str(instruction.argval)
        for one in _codes(code)
        for instruction in dis.get_instructions(one)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in one.co_freevars
    )
