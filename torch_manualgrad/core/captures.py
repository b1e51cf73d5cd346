"""Tensors that a function reads without receiving them as arguments: finds their names, and refuses reads."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .forward import is_in_forward_ad
from .internals import (
    has_tangent,
    is_compiled,
    is_escaped,
    is_functorch_wrapped,
    layers,
    levels_of,
    only_autograd,
    transform_depth,
    unwrap_if_dead,
)

__all__ = [
    "PLAIN",
    "HiddenTensorError",
    "Watch",
    "as_of_now",
    "is_differentiated",
    "is_followed",
    "reachable",
    "substituted",
    "substituting",
    "suspects",
]


class HiddenTensorError(RuntimeError):
    """A function reads a tensor that is not among its arguments, and the derivative with respect to it would be lost."""


_DEPTH = 6  # of nested attributes, containers and functions


def is_followed(x: Tensor) -> bool:
    """Whether autograd or a transform, including vmap, tracks a tensor at any level."""
    if is_in_forward_ad(x):
        return True
    if only_autograd():
        return x.requires_grad and torch.is_grad_enabled()
    if is_escaped(x):
        return True
    levels, tracked = levels_of(x)
    return tracked or bool(levels)


def is_differentiated(x: Tensor) -> bool:
    """Whether autograd or a differentiating transform tracks a tensor at any level."""
    if is_in_forward_ad(x):
        return True
    if only_autograd():
        return x.requires_grad and torch.is_grad_enabled()
    return is_escaped(x) or levels_of(x)[1]


def as_of_now(value: Any, made: dict[int, Any] | None = None) -> Any:
    """A function that reads closure variables, and globals of a script, with their current values, such as a loop's variable.

    So do the functions among these values, in partial calls, methods, defaults and tuples, and what has a method of this
    name. Other values stay as they are: functions of other modules that are globals, functions that a compiler has made,
    attributes of objects, and variables that the function itself writes.

    Args:
        value: the function, or something else that is called.
        made: what exists already, by the ids of the originals.
    """
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)][1]
    kind = type(value)
    if kind is types.FunctionType:
        return value if is_compiled(value) else _function_as_of_now(value, made)
    if kind is functools.partial:
        keywords = {name: as_of_now(x, made) for name, x in value.keywords.items()}
        return functools.partial(as_of_now(value.func, made), *as_of_now(value.args, made), **keywords)
    if kind is types.MethodType:
        return types.MethodType(as_of_now(value.__func__, made), as_of_now(value.__self__, made))
    if kind is tuple:
        copy = tuple([as_of_now(x, made) for x in value])
        return copy if any(x is not y for x, y in zip(copy, value)) else value
    return value.as_of_now(made) if hasattr(kind, "as_of_now") else value


def _function_as_of_now(function: types.FunctionType, made: dict[int, Any]) -> types.FunctionType:
    code, given = function.__code__, function.__globals__
    written = _written(code)
    cells = function.__closure__ or ()
    own = [name not in written for name in code.co_freevars]
    is_ours = (function.__module__ or "").split(".")[0] in ("torch", "torch_manualgrad")
    name = given.get("__name__", "")
    module = sys.modules.get(name)
    is_imported = name != "__main__" and module is not None and vars(module) is given  # and so has no loops
    read = {} if is_imported else {name: given[name] for name in _globals_of(code) if name in given}
    if all(isinstance(x, _FIXED) for x in read.values()):
        read = given
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if (
        not any(own)
        and read is given
        and not any(callable(x) or type(x) is tuple for x in (*defaults, *named.values()))
    ):
        return function
    closure = tuple([types.CellType() if new else cell for new, cell in zip(own, cells)])
    copy = types.FunctionType(code, read, function.__name__, None, closure)
    copy.__dict__.update(function.__dict__)
    copy.__module__ = function.__module__
    made[id(function)] = function, copy  # the original keeps its id
    copy.__defaults__ = as_of_now(function.__defaults__, made)
    copy.__kwdefaults__ = function.__kwdefaults__ and {name: as_of_now(x, made) for name, x in named.items()}
    for old, new in zip(cells, closure):
        if new is not old:
            with contextlib.suppress(ValueError):  # not assigned yet
                held = old.cell_contents
                new.cell_contents = as_of_now(held, made)
                if is_ours and type(held) is list:  # functions of the user, which only we have put there
                    now = as_of_now(tuple(held), made)
                    new.cell_contents = list(now) if any(x is not y for x, y in zip(now, held)) else held
    if read is not given:
        for name, x in read.items():
            if not isinstance(x, types.FunctionType) or x.__globals__ is given:
                read[name] = as_of_now(x, made)
        given.setdefault("__warningregistry__", {})
        read |= {name: given[name] for name in _OF_MODULES if name in given}
    return copy


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


class _Substitutions(threading.local):
    """The substitutions of the open contexts on this thread, the innermost last."""

    def __init__(self) -> None:
        self.functions: list[Callable[[Any], Any]] = []


_substitutions = _Substitutions()


@contextlib.contextmanager
def substituting(function: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager: functions read ``function(x)`` instead of ``x``."""
    _substitutions.functions.append(function)
    try:
        yield
    finally:
        _substitutions.functions.pop()


def substituted(x: Tensor) -> Tensor:
    """The tensor that a function called now reads instead of ``x``."""
    for function in reversed(_substitutions.functions):
        x = function(x)
    return x


def suspects(
    functions: Sequence[tuple[Any, str]],
    seen: dict[int, Any] | None = None,
    untracked: dict[int, tuple[Tensor, str]] | None = None,
) -> dict[int, tuple[Tensor, str]]:
    """The tracked tensors that functions can reach, by their ids, with names.

    Args:
        functions: with their names.
        seen: collects all objects that the functions can reach, such as modules, by their ids.
        untracked: collects the other tensors, like the result.
    """
    found: dict[int, tuple[Tensor, str]] = {}
    seen = {} if seen is None else seen
    for function, what in functions:
        for name, x in reachable(function, what, seen):
            if is_followed(substituted(x)):
                found.setdefault(id(x), (x, name))
            elif untracked is not None:
                untracked.setdefault(id(x), (x, name))
    return found


def reachable(
    value: Any, name: str, seen: dict[int, Any] | None = None, depth: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The tensors reachable from a value, or the value: by closure, globals, defaults, attributes and items."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        yield name, value
        return
    if depth > _DEPTH or isinstance(value, PLAIN) or id(value) in seen:
        return
    seen[id(value)] = value  # keeps the id from being reused
    if isinstance(value, torch.nn.Module):
        for key, x in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{key}", x
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield from reachable(item, f"{name}[{key!r}]", seen, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, item in enumerate(value):
            yield from reachable(item, f"{name}[{i}]", seen, depth + 1)
    elif isinstance(value, functools.partial):
        yield from reachable(value.func, name, seen, depth + 1)
        yield from reachable(value.args, name, seen, depth + 1)
        yield from reachable(value.keywords, name, seen, depth + 1)
    elif isinstance(value, types.MethodType):
        yield from reachable(value.__func__, name, seen, depth + 1)
        yield from reachable(value.__self__, _name_of(value.__self__), seen, depth + 1)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, seen, depth)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for key, item in list(vars(value).items()):
            yield from reachable(item, f"{name}.{key}", seen, depth + 1)
        yield from _of_classes(value, name)
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, types.FunctionType) and not isinstance(value, torch.nn.Module):
            yield from reachable(call, name, seen, depth + 1)


def _of_classes(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are attributes of an object's classes."""
    for kind in type(value).__mro__:
        if kind.__module__.split(".")[0] not in ("builtins", "torch", "torch_manualgrad"):
            yield from ((f"{name}.{key}", x) for key, x in list(vars(kind).items()) if isinstance(x, Tensor))


PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)


def _name_of(value: Any) -> str:
    return "self" if not inspect.ismodule(value) else str(value.__name__)


def _of_function(function: types.FunctionType, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    if (function.__module__ or "").split(".")[0] in ("torch", "torch_manualgrad"):
        for cell in function.__closure__ or ():
            yield from _at_chain(_of_cell(cell), function.__name__, (), seen, depth)
    else:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        for scope, variable, attributes in _loads(function.__code__):
            if scope == "global" and variable in function.__globals__:
                value = function.__globals__[variable]
            elif scope == "cell" and variable in cells:
                value = _of_cell(cells[variable])
            else:
                continue
            yield from _at_chain(value, variable, attributes, seen, depth)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from reachable(value, f"a default of {function.__name__}", seen, depth + 1)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from reachable(wrapped, function.__name__, seen, depth + 1)


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _at_chain(
    value: Any, name: str, attributes: Sequence[str], seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a variable reaches by the attributes read from it, if reading them runs no code."""
    for attribute in attributes:
        if isinstance(value, types.ModuleType):
            if attribute not in vars(value):
                return
            value = vars(value)[attribute]
        elif isinstance(value, torch.nn.Module):
            held = [vars(value), value._parameters, value._buffers, value._modules]
            found = next((h[attribute] for h in held if attribute in h), _of_class(type(value), attribute))
            if found is None:  # a method, which may read any attribute of its module
                break
            value = found
        elif attribute in getattr(value, "__dict__", {}):
            value = vars(value)[attribute]
        else:
            found = _of_class(value if isinstance(value, type) else type(value), attribute)
            if found is None:
                break
            value = found
        name = f"{name}.{attribute}"
    yield from reachable(value, name, seen, depth + 1)


def _of_class(kind: type, attribute: str) -> Any:
    """An attribute of a class that is a tensor or contains tensors; None for others."""
    found = inspect.getattr_static(kind, attribute, None)
    return found if isinstance(found, (Tensor, Mapping, list, tuple)) else None


@functools.lru_cache(maxsize=4096)
def _loads(code: types.CodeType) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """The globals and variables of enclosing functions that code reads, with the attributes that follow."""
    found: dict[tuple[str, str, tuple[str, ...]], None] = {}
    instructions = list(dis.get_instructions(code))
    for i, one in enumerate(instructions):
        scope = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "cell", "LOAD_CLASSDEREF": "cell"}.get(
            one.opname
        )
        if scope is None:
            continue
        chain = []
        for after in instructions[i + 1 :]:
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            chain.append(str(after.argval))
        found[scope, str(one.argval), tuple(chain)] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_loads(constant)))
    return tuple(found)


_OF_ANOTHER_LEVEL = "wrapper == nullptr"  # of an assertion in PyTorch, where levels that are not active have a tensor
_data: Any = Tensor.data
_CUTS = (Tensor.detach, _data.__get__)


class Watch(TorchFunctionMode):
    """Context manager: reading a tracked tensor that is not an argument raises.

    Args:
        what: the name of the function in errors.
        known: the `suspects`.
        advice: the end of the error.
        detached: whether the arguments are not tracked, so that any tracked tensor is another one.
    """

    def __init__(self, what: str, known: Mapping[int, tuple[Tensor, str]], advice: str, detached: bool = True) -> None:
        super().__init__()
        self.what, self.known, self.advice, self.detached = what, known, advice, detached
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._grad_was_enabled = torch.is_grad_enabled()
        self._outermost = transform_depth() == 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        foreign = self._foreign(func, (args, kwargs) if kwargs else args)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            if foreign is None and _OF_ANOTHER_LEVEL in str(error):
                foreign = f"a tensor that another transform follows, read by {getattr(func, '__name__', func)}"
            if foreign is None:
                raise
            raise self.error(foreign) from error
        # sizes, values and a detached copy have no derivative in any function
        if foreign is not None and func not in _CUTS and next(_tensors(result), None) is not None:
            raise self.error(foreign)
        if torch.is_grad_enabled():
            self._grad_was_enabled = True
        if self._grad_was_enabled:
            for x in _tensors(result):
                if x.requires_grad:
                    self._made[id(x)] = weakref.ref(x)
        return result

    def _foreign(self, func: Any, values: Any) -> str | None:
        found = [(x, layers(x) if self.detached else [x]) for x in map(unwrap_if_dead, _tensors(values))]
        known = [self.known[id(y)] for _, inside in found for y in inside if id(y) in self.known]
        names = {name for x, name in known if any(x is y for _, inside in found for y in inside)}
        if names:
            return ", ".join(sorted(names))
        for x, inside in found:
            if self.detached and (self._is_foreign(x) or x is not inside[-1] and self._is_foreign(inside[-1])):
                return f"a tensor of shape {list(x.shape)}, read by {getattr(func, '__name__', func)}"
        return None

    def _is_foreign(self, x: Tensor) -> bool:
        if is_in_forward_ad(x):
            return True
        if is_functorch_wrapped(x):
            return self._outermost and transform_depth() == 0
        if x.requires_grad:
            if self._grad_was_enabled and not x.is_leaf:  # an autograd.Function may have made it
                return False
            made = self._made.get(id(x))
            return made is None or made() is not x
        return not only_autograd() and self._outermost and transform_depth() == 0 and has_tangent(x)

    def error(self, name: str) -> HiddenTensorError:
        """The error for a tensor with this name."""
        return HiddenTensorError(
            f"{self.what} reads a tensor that requires grad, or that a transform follows, and that is not an argument: "
            f"{name}. {self.advice}"
        )


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
