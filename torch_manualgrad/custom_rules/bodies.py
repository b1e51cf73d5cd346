"""The graph of a call of a function with a rule: its parts, and the programs that they make.

The graph has a segment for the function, one for each function of its rule, and marks between them:

    argument...  the function  result...  fwd  out..., residual..., cotangent...  bwd  grad...
    argument...  the function  result...  tangent...  the jvp  moved...

Other inputs are tensors that the functions read by closure. A call inside of the function's own rule has only the first
segment, and its arguments are marked "again": it has the derivatives of the enclosing rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..core.calls_in_graphs import CallInGraph, Segment, Sizes
from ..core.captures import HiddenTensorError
from ..core.internals import calls_seen, modes_are_active, set_autocast_off
from ..programs.functions import Values
from ..programs.operator import Metadata, Program, call, node_of
from .function import advice
from .jvp import CustomJvp, JvpCall
from .tracing import OUT_OF_CONSTANTS, name_of, rule_node
from .trees import distinct
from .vjp import CustomVjp, VjpCall

__all__ = ["Rule"]


class Rule(CallInGraph):
    """The graph of a call of a function with a rule."""

    enclosing: tuple[Rule, ...]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results, self.is_again = self.marks("result"), bool(self.marks("again"))
        self.name, self.kind = name_of(self.number), "custom_vjp" if self.marks("out") else "custom_jvp"
        self.fun = Segment(self, self.arguments, self.results, self.inputs, self.results)
        self.metadata: list[Metadata] = []

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of the call's node: the results, and None for other marks.

        Args:
            values: of the graph's inputs.
        """
        tensors, sizes = self.given(values)
        program = self._program(tensors, sizes)
        found = node_of(program, tensors) if self.interpreter.stays else call(program, tensors)
        return self.returned(dict(zip(self.results, found)))

    def _program(self, tensors: Values, sizes: Sizes) -> Program:
        self.metadata, self.found = [Metadata.of(x) for x in tensors], sizes
        if not self.is_again:
            return (_Vjp if self.kind == "custom_vjp" else _Jvp)(self, tensors, sizes)
        rule = next(r for r in reversed(self.enclosing) if r.number == self.number)
        same = (rule.key, rule.metadata) == (self.key, self.metadata)
        if not same or rule.closure or self.closure or not rule.found.are_known:
            return _Unknown(self, sizes)
        return rule._program(tensors, rule.found)


rule_node.kind = Rule


class _Unknown(Program):
    """A call of a function inside of its own rule, with arguments that differ from those of the rule's call."""

    def __init__(self, rule: Rule, sizes: Sizes) -> None:
        super().__init__()
        self.rule, self.sizes = rule, sizes

    @property
    def outputs(self) -> int:
        return len(self.rule.results)

    def run(self, tensors: Values) -> list[Tensor]:
        return distinct(self.rule.fun(*tensors, *self.sizes.of(tensors)), tensors)

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        return (), ()

    def vjp(self, *args: Any) -> Any:
        """Raise."""
        self._refuse()

    def jvp(self, *args: Any) -> Any:
        """Raise."""
        self._refuse()

    def _refuse(self) -> None:
        raise NotImplementedError(
            f"{self.rule.name}: its rule calls the function with other shapes, constants or tensors read by closure; a compiled "
            "function has no derivative of such a call"
        )


class _Closures:
    """The common part of a rule's programs: after the tensors of the arguments come those read by closure."""

    rule: Rule
    sizes: Sizes
    random: Any
    alone: Any
    draws = False
    _read: set[Any]  # the nodes of tensors whose derivative would be lost

    @property
    def outputs(self) -> int:
        """How many results there are."""
        return len(self.rule.results)

    def run_alone(self, tensors: Values) -> list[Tensor]:
        """The results of the function."""
        found = self.first(self.alone, self.rule.name, tensors)
        return distinct(found, tensors)

    def first(self, function: Any, what: str, tensors: Values) -> Any:
        """Call the function for the first time."""
        if not self.rule.interpreter.stays and not modes_are_active():
            return super().first(function, what, tensors)  # type: ignore[misc]
        with calls_seen(self._see):
            return function(*tensors)

    def again(self, function: Any, *args: Any) -> Any:
        """Call a function with the random numbers of the first call."""
        if self.draws:
            raise self._drawn()
        return function(*args) if self.random is None else super().again(function, *args)  # type: ignore[misc]

    def _see(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if torch.Tag.nondeterministic_seeded in op.tags:
            self.draws = True
            if self.rule.interpreter.stays:
                raise self._drawn()

    def _drawn(self) -> Exception:
        return NotImplementedError(
            f"{self.rule.name} draws random numbers, and a derivative computes it again: a compiled function cannot draw the same "
            "numbers. Draw them outside, and pass them as an argument"
        )

    def _refuse_hidden(self, places: Sequence[int]) -> None:
        rule = self.rule
        for i in places:
            if i >= len(rule.arguments) and rule.inputs[i] in self._read:
                raise HiddenTensorError(
                    f"{rule.name} reads a tensor that requires grad, or that a transform follows, and that is not an argument: "
                    f"{rule.inputs[i].name}. {advice(rule.kind)}"
                )

    def vjp(self, xs: Any, tensors: Any, places: Any, grads: Any) -> Any:
        """The cotangents."""
        self._refuse_hidden(places)
        return super().vjp(xs, tensors, places, grads)  # type: ignore[misc]

    def jvp(self, xs: Any, tensors: Any, places: Any, tangents: Any, keeps: Any) -> Any:
        """The tangents."""
        self._refuse_hidden(places)
        return super().jvp(xs, tensors, places, tangents, keeps)  # type: ignore[misc]


class _Vjp(_Closures, VjpCall):
    def __init__(self, rule: Rule, tensors: Values, sizes: Sizes) -> None:
        self.rule, self.sizes = rule, sizes
        outs, residuals, cotangents, grads = map(rule.marks, ("out", "residual", "cotangent", "grad"))
        if [n.args[2] for n in outs] != [n.args[2] for n in rule.results]:
            raise ValueError(f"the fwd of {rule.name}: expected a result like that of the function")
        marks = [*outs, *residuals, *cotangents]
        fwd = Segment(rule, rule.results, marks, rule.inputs, [*outs, *residuals])
        others = [*rule.closure, *rule.sizes]
        bwd = Segment(rule, marks, grads, [*residuals, *cotangents, *others], grads)
        self.own_are_constants = any(n.args[1] == OUT_OF_CONSTANTS for n in outs)
        self._read = set() if self.own_are_constants else {*rule.fun.reads, *fwd.reads}
        n, count = len(outs), len(rule.arguments)
        at = {mark.args[2]: i for i, mark in enumerate(outs)}
        smooth = [at[c.args[2]] for c in cotangents]

        def call_fwd(*given: Any) -> Any:
            found = fwd(*given, *sizes.of(given))
            return tuple(found[:n]), (tuple(found[n:]), given)

        def call_bwd(kept: Any, grads_of_out: Any) -> Any:
            # autograd calls the backward of an autograd.Function when the program has left autocast
            with set_autocast_off() if self.own_are_constants else nullcontext():
                found = bwd(*kept[0], *[grads_of_out[i] for i in smooth], *kept[1][count:], *sizes.of(kept[1]))
            result = [None] * len(tensors)
            for mark, g in zip(grads, found):
                result[mark.args[2]] = g
            return tuple(result)

        flat = CustomVjp(lambda *given: tuple(rule.fun(*given, *sizes.of(given))))
        self.alone = flat.in_autocast(flat.fun)
        flat.name = rule.name
        flat.defvjp(call_fwd, call_bwd)
        super().__init__(flat, [f"tensor {i}" for i in range(len(tensors))], tensors, {}, False)


class _Jvp(_Closures, JvpCall):
    def __init__(self, rule: Rule, tensors: Values, sizes: Sizes) -> None:
        self.rule, self.sizes = rule, sizes
        tangents, moved = rule.marks("tangent"), rule.marks("moved")
        others = [*rule.closure, *rule.sizes]
        before = tangents or rule.results
        self._read = set(rule.fun.reads)
        part = Segment(rule, before, moved, [*rule.arguments, *tangents, *others], moved)
        at = {mark.args[2]: i for i, mark in enumerate(rule.results)}

        def call_jvp(primals: Any, moving: Any) -> Any:
            count = len(rule.arguments)
            given = [moving[t.args[2]] for t in tangents]
            found = part(*primals[:count], *given, *primals[count:], *sizes.of(primals))
            result = [None] * len(at)
            for mark, t in zip(moved, found):
                result[at[mark.args[2]]] = t
            return tuple(range(len(at))), tuple(result)  # only the structure of the first is read

        flat = CustomJvp(lambda *given: tuple(rule.fun(*given, *sizes.of(given))))
        self.alone = flat.in_autocast(flat.fun)
        flat.name = rule.name
        flat.defjvp(call_jvp)
        super().__init__(flat, [f"tensor {i}" for i in range(len(tensors))], tensors, {}, False)
