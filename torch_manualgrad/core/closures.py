"""Functions that read closure variables, and globals of scripts, with the values of now, whenever they are called."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from .internals import is_compiled, runs_eagerly, uncompiled

__all__ = ["Made", "as_of_now"]


class Made:
    """What has been copied, and from which variables.

    Args:
        in_compiled: whether these are for one compiled function, with those that it calls.
    """

    __slots__ = ("_variables", "copies", "in_compiled")  # no attributes, in which tensors are searched

    def __init__(self, in_compiled: bool = False) -> None:
        self.in_compiled = in_compiled
        self.copies: dict[int, tuple[Any, Any]] = {}  # pairs of an original and its copy, by the ids of the originals
        self._variables: list[tuple[types.CellType | dict[str, Any], str, Any]] = []

    def add(self, original: Any, copy: Any) -> None:
        """A new copy."""
        self.copies[id(original)] = original, copy  # the original keeps its id

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


def as_of_now(value: Any, made: Made | None = None) -> Any:
    """A function that reads closure variables, and globals of a script, with their current values, such as a loop's variable.

    So do the functions among these values, in partial calls, methods, defaults, tuples, lists, dictionaries, and what has a
    method of this name. A compiled function stays compiled while its variables do not change. Other values stay as they
    are: functions of other modules that are globals, attributes of objects, and variables that the function itself writes.

    Args:
        value: the function, or something else that is called.
        made: what exists already.
    """
    made = Made() if made is None else made
    if id(value) in made.copies:
        return made.copies[id(value)][1]
    kind = type(value)
    if kind is types.FunctionType:
        return _compiled_as_of_now(value, made) if is_compiled(value) else _function_as_of_now(value, made)
    if kind is functools.partial:
        keywords = {name: as_of_now(x, made) for name, x in value.keywords.items()}
        return functools.partial(as_of_now(value.func, made), *as_of_now(value.args, made), **keywords)
    if kind is types.MethodType:
        return types.MethodType(as_of_now(value.__func__, made), as_of_now(value.__self__, made))
    if kind is tuple or kind in (list, dict) and len(value) <= _MOST:
        return _items_as_of_now(value, made)
    return value.as_of_now(made) if hasattr(kind, "as_of_now") else value


def _items_as_of_now(value: Any, made: Made) -> Any:
    made.add(value, value)  # one that contains itself keeps itself
    copies = [as_of_now(x, made) for x in (value.values() if type(value) is dict else value)]
    if all(x is y for x, y in zip(copies, value.values() if type(value) is dict else value)):
        return value
    copy = dict(zip(value, copies)) if type(value) is dict else type(value)(copies)
    made.add(value, copy)
    return copy


_MOST = 256  # entries of a list or dictionary that is searched for functions at each call


def _compiled_as_of_now(function: types.FunctionType, made: Made) -> Any:
    own = made if made.in_compiled else Made(in_compiled=True)

    @functools.wraps(function, updated=())
    def compiled_or_not(*args: Any, **kwargs: Any) -> Any:
        # compiled code reads variables itself, from the places where the original has them
        eager = runs_eagerly()
        changed = [] if eager else own.changed()
        if not changed and not eager:
            return function(*args, **kwargs)
        before = _generator_states()
        result = copy(*args, **kwargs)
        if changed and not all(map(torch.equal, before, _generator_states())):
            raise RuntimeError(
                f"a derivative calls the compiled function {function.__name__} again, which reads the variable {changed[0]}: "
                "it has changed since the call, and the function draws random numbers, which would be others uncompiled. "
                "Pass the variable as an argument"
            )
        return result

    made.add(function, compiled_or_not)
    own.add(function, compiled_or_not)
    original = uncompiled(function)
    copy = as_of_now(original, own)
    if copy is original:
        made.add(function, function)
    return made.copies[id(function)][1]


def _generator_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _function_as_of_now(function: types.FunctionType, made: Made) -> types.FunctionType:
    code, given = function.__code__, function.__globals__
    written = _written(code)
    cells = function.__closure__ or ()
    own = [name not in written for name in code.co_freevars]
    name = given.get("__name__", "")
    module = sys.modules.get(name)
    is_imported = name != "__main__" and module is not None and vars(module) is given  # and so has no loops
    read = {} if is_imported else {name: given[name] for name in _globals_of(code) if name in given}
    if all(isinstance(x, _FIXED) for x in read.values()):
        read = given
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not any(own) and read is given and not any(map(_may_hold_functions, (*defaults, *named.values()))):
        return function
    closure = tuple([types.CellType() if new else cell for new, cell in zip(own, cells)])
    copy = types.FunctionType(code, read, function.__name__, None, closure)
    copy.__dict__.update(function.__dict__)
    copy.__module__ = function.__module__
    made.add(function, copy)
    copy.__defaults__ = as_of_now(function.__defaults__, made)
    copy.__kwdefaults__ = function.__kwdefaults__ and {name: as_of_now(x, made) for name, x in named.items()}
    for variable, old, new in zip(code.co_freevars, cells, closure):
        if new is not old:
            with contextlib.suppress(ValueError):  # not assigned yet
                made.read(old, variable, old.cell_contents)
                new.cell_contents = as_of_now(old.cell_contents, made)
    if read is not given:
        for name, x in read.items():
            made.read(given, name, x)
            if not isinstance(x, types.FunctionType) or is_compiled(x) or x.__globals__ is given:
                read[name] = as_of_now(x, made)
        given.setdefault("__warningregistry__", {})
        read |= {name: given[name] for name in _OF_MODULES if name in given}
    return copy


def _may_hold_functions(value: Any) -> bool:
    return callable(value) or type(value) in (tuple, list, dict)


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
