"""Compiled functions under torch.func and mg.forward_ad, where Dynamo compiles nothing.

Dynamo is called with stand-ins, plain tensors of the same shapes, to find or make the graph. The graph's function, an
operator, then runs with the real arguments, at the levels of the transforms. A function of mg.forward_ad is compiled with the
function that it differentiates.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.forward import compilers
from ..core.internals import (
    in_functorch,
    is_functorch_wrapped,
    is_traced_by_fx,
    memory_of,
    outside_of_transforms,
    pytree,
    runs_eagerly,
    skipped_by_dynamo,
    with_tensors,
)
from ..core.override.override import active_rules
from . import watching
from .function import Options, Unsupported
from .program import Program

__all__ = ["recorded", "under_transforms"]

_here = threading.local()
_numbers = itertools.count()
_CONSTANTS = int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device
_OUTSIDE = "it reads a tensor of the transform that is not an argument"


@contextmanager
def _recording() -> Iterator[list[tuple[Program, Sequence[Any], list[Any]]]]:
    before, _here.seen = getattr(_here, "seen", None), []
    try:
        yield _here.seen
    finally:
        _here.seen = before


def recorded(program: Program, values: Sequence[Any], keeps_values: bool) -> list[Any] | None:
    """Stand-ins for the outputs of a graph, which is not run; None if the call must run.

    Args:
        program: of the graph.
        values: its inputs.
        keeps_values: the code around the graph stores values in objects: these would be stand-ins.
    """
    seen = getattr(_here, "seen", None)
    if seen is None:
        return None
    if keeps_values:
        raise Unsupported("it stores values in objects")
    outputs = program.stand_ins(values)
    seen.append((program, values, outputs))
    return outputs


def under_transforms(
    function: Callable[..., Any],
    compiled: Callable[..., Any],
    as_one_graph: Callable[[Callable[..., Any]], Callable[..., Any]],
    options: Options,
) -> Callable[..., Any]:
    """A compiled function whose transforms by torch.func and mg.forward_ad are compiled, too.

    Args:
        function: a function, or the call of a module.
        compiled: what torch.compile has made of it.
        as_one_graph: compiles a function in the same way, as one graph.
        options: how to report calls that run uncompiled.
    """
    module = getattr(function, "__self__", getattr(function, "__wrapped__", None))
    module = module if isinstance(module, nn.Module) else None
    whole: list[Callable[..., Any]] = []  # the function as one graph, once it is needed
    refused = False  # calls that fail are not traced again
    called = False

    @skipped_by_dynamo
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal refused, called
        if is_traced_by_fx():  # as torch.func.linearize does: the trace has the operators of the function
            return function(*args, **kwargs)
        if not in_functorch():
            if called:
                return compiled(*args, **kwargs)
            called = True
            with watching.graphs_expected(lambda why: options.report("a function runs uncompiled", Unsupported(why))):
                return compiled(*args, **kwargs)
        if runs_eagerly():
            return function(*args, **kwargs)
        if refused:
            return _uncompiled(function, args, kwargs)
        if not whole:  # torch.nn's forwards and hooks are traced only if called from another function
            whole.append(as_one_graph(function if module is None else _calling(function, {})))
        try:
            return _call(function, whole[0], module, args, kwargs)
        except Exception as error:
            result = _uncompiled(function, args, kwargs)  # raises the program's own errors
            refused = not isinstance(error, Unsupported)
            options.report("a function runs uncompiled under torch.func", error)
            return result

    found = functools.update_wrapper(call, compiled)
    compilers[found] = functools.partial(_transformed, function, as_one_graph, options, {})
    return found


def _transformed(
    function: Callable[..., Any],
    as_one_graph: Callable[[Callable[..., Any]], Callable[..., Any]],
    options: Options,
    codes: dict[Any, CodeType | None],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]],
    key: Any,
) -> Callable[..., Any]:
    """A transform of a function, compiled like the function; uncompiled if ``codes`` has None for the key."""
    uncompiled = transform(function)
    compiled = None if codes.get(key, True) is None else as_one_graph(_calling(uncompiled, codes, key))

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiled is None or runs_eagerly():
            return uncompiled(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            result = uncompiled(*args, **kwargs)  # raises the program's own errors
            codes[key] = None  # it is not traced again
            options.report("a function runs uncompiled under mg.forward_ad", error)
            return result

    def compile(outer: Callable[..., Any], other: Any) -> Callable[..., Any]:
        return _transformed(function, as_one_graph, options, codes, lambda f: outer(transform(f)), (key, other))

    compilers[call] = compile
    return call


def _calling(function: Callable[..., Any], codes: dict[Any, CodeType | None], key: Any = None) -> Callable[..., Any]:
    """A function that calls another one. Dynamo finds its graphs, and limits their number, by its code, one per key.

    It finds which numbers vary by the name of the code.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = codes.setdefault(key, call.__code__.replace(co_name=f"call_{next(_numbers)}"))
    assert code is not None
    return FunctionType(code, globals(), closure=call.__closure__)


def _call(
    function: Callable[..., Any], compiled: Callable[..., Any], module: nn.Module | None, args: Any, kwargs: Any
) -> Any:
    """Call a function that is compiled as one graph inside of a transform; if it has no graph, the function itself."""
    if any(isinstance(x, Tensor) and is_functorch_wrapped(x) for x in _closure(function)):
        raise Unsupported(_OUTSIDE)  # Dynamo cannot read it
    leaves, structure = pytree.tree_flatten((args, kwargs))
    own = {} if module is None else _of_transform(module)
    with outside_of_transforms():
        made = {id(x): _stand_in(x) for x in [*leaves, *own.values()] if isinstance(x, Tensor)}
        actual = {id(made[id(x)]): x for x in [*leaves, *own.values()] if isinstance(x, Tensor)}
        given, named = pytree.tree_unflatten([made.get(id(x), x) for x in leaves], structure)
        swapped = nullcontext() if module is None else with_tensors(module, {n: made[id(x)] for n, x in own.items()})
        with _recording() as seen, swapped:
            result = compiled(*given, **named)
    if not seen:
        return _uncompiled(function, args, kwargs)
    if len(seen) != 1:
        raise Unsupported("it is several graphs")
    program, values, outputs = seen[0]
    for x in pytree.tree_leaves(result):
        if not isinstance(x, (Tensor, *_CONSTANTS)):  # it may have stand-ins in it
            raise Unsupported(f"it returns a {type(x).__name__}, which is no pytree")
    if program.noise:
        raise Unsupported("it draws random numbers")
    if any(isinstance(v, Tensor) and id(v) not in actual and is_functorch_wrapped(v) for v in values):
        raise Unsupported(_OUTSIDE)
    known = {*actual, *map(id, outputs)}
    memory = {memory_of(x) for x in (*made.values(), *outputs) if isinstance(x, Tensor)} - {None}
    for x in (*values, *pytree.tree_leaves(result)):
        if isinstance(x, Tensor) and id(x) not in known and memory_of(x) in memory:
            raise Unsupported("Dynamo makes a view of an argument outside of the graph, such as x.T")
    found = program(*[actual.get(id(v), v) for v in values])
    actual |= {id(o): f for o, f in zip(outputs, found)}
    return pytree.tree_map(lambda x: actual.get(id(x), x), result)


def _uncompiled(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with active_rules():
        return function(*args, **kwargs)


def _closure(function: Any) -> Iterator[Any]:
    """The values of the variables that a function reads from functions around it."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # empty
            yield cell.cell_contents


def _stand_in(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _of_transform(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that functional_call has replaced by tensors of a transform, by name."""
    return {
        name: x
        for named in (module.named_parameters, module.named_buffers)
        for name, x in named(remove_duplicate=False)
        if is_functorch_wrapped(x)
    }
