"""Calls of compiled functions in C++: csrc/calls/graphs.h.

For each function the library has the strides of its arguments; for each derivative, the saved tensors and the graph of
the backward. It makes autograd's nodes, and calls inductor's C++ code, or Python for a graph without it. Calls with open sizes, dual numbers,
transforms or autocast stay in Python, and so do all calls without the library.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.engine.node import function_name, pull_back
from ..core.internals import code_in_cpp, skipped_by_dynamo
from ..core.libraries import calls_library, checked

__all__ = ["functions", "note_function", "note_rule", "note_run", "numbers", "run", "served", "share_versions"]

numbers = itertools.count(1)  # of functions and of their derivatives
functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # `function.Function`, by number
_rules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # `function.Compiled`, by number
run: dict[int, Callable[[list[Any]], Sequence[Any]]] = {}  # by the number of a function: its graph, once it is compiled
# the call of a function, by its number
served: Any = None if calls_library is None else torch.ops.manualgrad_calls.graph


def _encoded(*given: Any) -> Any:
    """Numbers, and lists with their length before them, as an array."""
    found: list[int] = []
    for x in given:
        found += [len(x), *map(int, x)] if isinstance(x, Sequence) else [int(x)]
    return (ctypes.c_int64 * len(found))(*found)


@functools.cache
def _number_of(dtype: torch.dtype) -> int:
    """The number of a dtype in C++."""
    return int(torch.ops.manualgrad_calls.dtype(torch.empty(0, dtype=dtype, device="cpu")))


def share_versions(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Let outputs share version counters with the arguments and outputs whose memory they share. Needs the library."""
    if calls_library is not None:
        torch.ops.manualgrad_calls.share_versions(outputs, values)


def _drop(number: int) -> None:
    run.pop(number, None)
    calls_library.manualgrad_calls_graph_drop(ctypes.c_int64(number))


def note_function(function: Any) -> bool:
    """Register a function with the library. Returns whether the library makes its calls: not if sizes are open."""
    if calls_library is None or function.places:
        return False
    arguments: list[Any] = []
    for x in function.fakes:
        arguments += [x.stride(), _number_of(x.dtype)]
    views = [i in function.views for i in range(function.outputs)]
    given = _encoded(len(function.fakes), *arguments, views)
    checked(calls_library.manualgrad_calls_graph_define(ctypes.c_int64(function.number), given))
    weakref.finalize(function, _drop, function.number)
    return True


def note_run(number: int, compiled: Callable[[list[Any]], Sequence[Any]]) -> None:
    """Tell the library how to run a function that it serves, once it is compiled."""
    run[number] = compiled
    if code := code_in_cpp(compiled):
        checked(calls_library.manualgrad_calls_graph_code(ctypes.c_int64(number), ctypes.c_void_p(code)))


def note_rule(derivative: Any) -> int:
    """Register a derivative with the library. Returns its number; -1 if Python handles it."""
    if not derivative.forward.is_served:
        return -1
    number = next(numbers)
    levels: list[Any] = []
    for outputs, level, saved in zip(derivative.bounds, derivative.tower.levels, derivative.saved_of_levels):
        levels += [outputs, level.smooth, level.wanted, saved]
    given = _encoded(
        derivative.forward.number,
        derivative.tower.function.outputs,
        derivative.differentiable,
        derivative.of_inputs,
        derivative.of_outputs,
        len(derivative.bounds),
        *levels,
    )
    owner, name = ctypes.c_void_p(id(derivative)), f"{function_name(derivative.signature)}Backward"
    checked(calls_library.manualgrad_calls_graph_define_rule(ctypes.c_int64(number), owner, name.encode(), given))
    _rules[number] = derivative
    weakref.finalize(derivative, _drop, number)
    return number


# -- callbacks of the library ------------------------------------------------------------------------------------------


def _run(number: int, place: int) -> Sequence[Tensor]:
    values = torch.ops.manualgrad_calls.handed_over(place)
    compiled = run.get(number)
    return functions[number].primal(*values) if compiled is None else compiled(values)


def _call(number: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
    return functions[number].in_python(*values)


def _rule_of(number: int, needs: Sequence[bool]) -> int:
    function = functions[number]
    tower = None if function.uncompiled else function.tower(tuple(needs))
    return -1 if tower is None else tower.derivative().number


def _backward_of(rule: int, level: int, given: Sequence[bool], wanted: Sequence[bool]) -> list[int]:
    function, places = _rules[rule].tower.level(level).backward_for(tuple(given), tuple(wanted))
    return [function.number if function.is_served else -1, *places]


def _vjp(
    rule: int, needed: Sequence[bool], tensors: Any, inputs: Any, versions: Sequence[int], grads: Any
) -> Sequence[Tensor | None]:
    context = SimpleNamespace(nothing_saved=tensors, static=(inputs, versions))
    return pull_back(_rules[rule], context, needed, grads)


if calls_library is not None:
    _operators = torch.library.Library("manualgrad_calls", "FRAGMENT")
    _kernels: dict[str, Callable[..., Any]] = {
        "run_graph(int graph, int place) -> Tensor[]": _run,
        "call_graph(int graph, Tensor[] values) -> Tensor[]": _call,
        "graph_rule(int graph, bool[] needs) -> int": _rule_of,
        "graph_backward(int rule, int level, bool[] given, bool[] wanted) -> int[]": _backward_of,
        "graph_vjp(int rule, bool[] needed, Any tensors, Any inputs, int[] versions, Any grads) -> Tensor?[]": _vjp,
    }
    for _schema, _kernel in _kernels.items():
        _operators.define(_schema)
        _operators.impl(_schema.partition("(")[0], skipped_by_dynamo(_kernel), "CPU")
