"""Faults planted into `torch_manualgrad.compiling`, on functions that are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torch_manualgrad as mg
from torch_manualgrad.compiling import function as functions, graphs, zeros

from .own import points
from .subject import REAL, Mutant, Subject

Fault = Callable[[], AbstractContextManager[Any]]
aten = torch.ops.aten


def _mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (x @ w).tanh() @ v


def _normalized(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x * w, (3,)).exp()


def _cells(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    state = (x @ h).sigmoid() * x.tanh()
    return state * h, state.exp()


# each with some inputs and outputs of one shape, which a fault can exchange
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "product": (lambda x, y: (x * y).sin() * y.exp(), 2),
    "two outputs": (lambda x, y: (x.sin() * y, (x @ y).tanh()), 2),
    "perceptron": (_mlp, 3),
    "normalized": (_normalized, 2),
    "softmax": (lambda x, y: (x @ y).softmax(-1) * y, 2),
    "cells": (_cells, 2),
}


def _changed(target: Any, name: str, change: Callable[[Any], Any]) -> Fault:
    """Replace an attribute by what ``change`` makes of it."""
    return lambda: patch.object(target, name, change(getattr(target, name)))


def _with_graph(function: Callable[..., Any], change: Callable[[fx.GraphModule], None]) -> Callable[..., Any]:
    """A lowering that gets a changed copy of each graph."""

    def lowering(graph: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> Any:
        copy = fx.GraphModule(graph, graph.graph.__deepcopy__({}))
        for new, old in zip(copy.graph.nodes, graph.graph.nodes):
            new.meta = dict(old.meta)
        change(copy)
        copy.recompile()
        return function(copy, fakes, mode)

    return lowering


# -- tangents ---------------------------------------------------------------------------------------------------------


def _still(jvp: Any) -> Any:
    """The last tangent is taken for zero."""

    def changed(self: Any, inputs: Any, outputs: Any, tangents: Any) -> Any:
        moving = [i for i, t in enumerate(tangents) if isinstance(t, Tensor)]
        return jvp(self, inputs, outputs, [None if i == moving[-1] else t for i, t in enumerate(tangents)])

    return changed


def _without_last_tangent(pushed_forward: Any) -> Any:
    def changed(*args: Any) -> Any:
        graph, places = pushed_forward(*args)
        graphs.set_outputs(graph, graphs.outputs_of(graph)[:-1])
        return graph, places[:-1]

    return changed


def _negative_tangent(pushed_forward: Any) -> Any:
    def changed(*args: Any) -> Any:
        graph, places = pushed_forward(*args)
        _wrap_output(graph, -1, aten.neg.default)
        return graph, places

    return changed


def _wrap_output(graph: fx.GraphModule, place: int, op: Any, *args: Any) -> None:
    """Pass one output through an operator."""
    outputs = graphs.outputs_of(graph)
    node = outputs[place]
    with graph.graph.inserting_before(graph.graph.output_node()):
        made = graph.graph.call_function(op, (node, *args))
    made.meta = dict(node.meta)
    outputs[place] = made
    graphs.set_outputs(graph, outputs)


# -- cotangents -------------------------------------------------------------------------------------------------------


def _ignoring_last(vjp: Any) -> Any:
    """The cotangent of the last output is taken for zero, where there is another."""

    def changed(self: Any, needed: Any, tensors: Any, static: Any, grads: Any) -> Any:
        given = [i for i, g in enumerate(grads) if g is not None]
        if len(given) > 1:
            grads = [None if i == given[-1] else g for i, g in enumerate(grads)]
        return vjp(self, needed, tensors, static, grads)

    return changed


def _ignoring_residuals(vjp: Any) -> Any:
    """The cotangents of residuals are taken for zero: what a second derivative has through them is lost."""

    def changed(self: Any, needed: Any, tensors: Any, static: Any, grads: Any) -> Any:
        own = self.tower.function.outputs
        if any(g is not None for g in grads[:own]):
            grads = [g if i < own else None for i, g in enumerate(grads)]
        return vjp(self, needed, tensors, static, grads)

    return changed


def _absorbing(bilinear: Any) -> Any:
    """A sum is taken for zero where one of its terms is, as a product is."""
    return {*bilinear, aten.add}


# -- residuals --------------------------------------------------------------------------------------------------------


def _exchanged(joint: Any) -> Any:
    """Two residuals of one shape change places."""

    def changed(*args: Any) -> Any:
        found = joint(*args)
        if found is not None:
            values = graphs.residuals_of(found)
            for i, j in itertools.combinations(range(len(values)), 2):
                if values[i].shape == values[j].shape:
                    saved = list(found.saved)
                    saved[i], saved[j] = saved[j], saved[i]
                    found.saved = tuple(saved)
                    break
        return found

    return changed


def _first_ones(residuals: Any) -> Any:
    """The residuals of the first call are kept for all calls."""

    def changed(self: Any, inputs: Any, outputs: Any) -> Any:
        tensors, static = residuals(self, inputs, outputs)
        self.first = getattr(self, "first", None) or [x.detach().clone() for x in tensors]
        return tuple(self.first), static

    return changed


def _constant_residual(joint: Any) -> Any:
    """The backward takes its first residual for a constant."""

    def changed(*args: Any) -> Any:
        found = joint(*args)
        if found is not None and found.saved:
            graph = found.backward.graph
            first = graph.find_nodes(op="placeholder")[0]
            after = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(after):
                stopped = graph.call_function(graphs.stop, (first,))
            stopped.meta = dict(first.meta)
            first.replace_all_uses_with(stopped, lambda user: user is not stopped)
            found.backward.recompile()
        return found

    return changed


def _reversed_at_second_level(init: Any) -> Any:
    """The residuals of residuals are read in the opposite order: wrong from the second time on."""

    def changed(self: Any, tower: Any, depth: int, dual: bool) -> None:
        init(self, tower, depth, dual)
        first, *others = self._of_level
        self._of_level = [first, *(lambda tensors, pick=pick: pick(tensors)[::-1] for pick in others)]

    return changed


# -- gradients and graphs -----------------------------------------------------------------------------------------------


def _to_the_wrong_input(backward_for: Any) -> Any:
    """Two gradients of one shape change places."""

    def changed(self: Any, given: Any, wanted: Any) -> Any:
        made, places = backward_for(self, given, wanted)
        shapes = [n.meta["val"].shape for n in graphs.outputs_of(made.graph)]
        for i, j in itertools.combinations(range(len(shapes)), 2):
            if shapes[i] == shapes[j]:
                places = list(places)
                places[i], places[j] = places[j], places[i]
                return made, tuple(places)
        return made, places

    return changed


def _negative(name: str) -> Callable[[Any], Any]:
    """The sign of the first output of graphs of this name."""

    def change(primal: Any) -> Any:
        def changed(self: Any, *values: Any) -> Any:
            outputs = primal(self, *values)
            return (-outputs[0], *outputs[1:]) if self.name.endswith(name) and outputs else outputs

        return changed

    return change


def _narrow(primal: Any) -> Any:
    """Backward graphs lose digits."""

    def changed(self: Any, *values: Any) -> Any:
        outputs = primal(self, *values)
        return tuple(x.float().to(x.dtype) for x in outputs) if self.name.endswith("_backward") else outputs

    return changed


def _first_values(graph: fx.GraphModule) -> None:
    """The first tanh, exp, sigmoid or product of a graph is computed once, and kept."""
    kept: list[Tensor] = []
    wanted = (aten.tanh.default, aten.exp.default, aten.sin.default, aten.sigmoid.default, aten.mul.Tensor)
    node = next((n for n in graph.graph.nodes if n.target in wanted), None)
    if node is not None:

        def once(*args: Any, op: Any = node.target) -> Tensor:
            if not kept:
                kept.append(op(*args))
            return kept[0]

        node.target = once


#: What is done -> the fault.
FAULTS: dict[str, Fault] = {
    "the tangent of the last input is dropped": _changed(functions.Compiled, "jvp", _still),
    "the tangent of the last output is dropped": _changed(graphs, "pushed_forward", _without_last_tangent),
    "the tangent of the last output has the wrong sign": _changed(graphs, "pushed_forward", _negative_tangent),
    "the cotangent of the last output is dropped": _changed(functions.Compiled, "vjp", _ignoring_last),
    "the cotangents of residuals are dropped": _changed(functions.Compiled, "vjp", _ignoring_residuals),
    "a sum with a zero term is zero": _changed(zeros, "_BILINEAR", _absorbing),
    "two residuals are exchanged": _changed(graphs, "joint", _exchanged),
    "residuals of the first call": _changed(functions.Compiled, "residuals", _first_ones),
    "a residual is a constant": _changed(graphs, "joint", _constant_residual),
    "residuals of residuals are reversed": _changed(functions.Compiled, "__init__", _reversed_at_second_level),
    "two gradients are exchanged": _changed(functions.Level, "backward_for", _to_the_wrong_input),
    "a backward has the wrong sign": _changed(functions.Function, "primal", _negative("compiled_backward")),
    "a second backward has the wrong sign": _changed(functions.Function, "primal", _negative("backward_backward")),
    "a backward loses digits": _changed(functions.Function, "primal", _narrow),
    "a value of the first call": lambda: patch.dict(
        functions.lowerings, {"eager": _with_graph(functions.lowerings["eager"], _first_values)}
    ),
}


def compiled_mutants() -> Iterator[Mutant]:
    for (name, (f, arity)), (what, fault) in itertools.product(FUNCTIONS.items(), FAULTS.items()):

        def subject(fault: Fault | None, name: str = name, f: Any = f, arity: int = arity) -> Subject:
            sample = mg.Sample(*(points(3, 3, dtype=REAL) * (0.3 + 0.2 * i) for i in range(arity)))
            return Subject(f"compiled {name}", f, [sample], fault=fault, compiled=True)

        yield Mutant("compiled", f"{name}: {what}", name, lambda s=subject, fault=fault: (s(fault), s(None)))
