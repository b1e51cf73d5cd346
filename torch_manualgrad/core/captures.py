"""Tensors that a function reads without receiving them as arguments: finds their names, and refuses reads."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
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
