"""The operator behind functions with rules, and its derivatives in all modes.

A program is a function of tensors with rules for its vjp and its jvp, such as a call of a function with a custom rule, a
checkpoint or an equation with a solver. The operator runs it once, outside of all transforms and under
``torch.no_grad()``, and applies the rule at each level that differentiates. The rules run on tensors that are tracked at
all other levels, so that higher derivatives are those of the rules.

The values that a program keeps for its backward are further results of the operator. So they have derivatives too, for
the second derivative.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.calls_in_graphs import bodies
from ..core.engine.derivative import Derivative, redispatch
from ..core.engine.kernel import Mode, apply, differentiated
from ..core.forward import apart_from_levels, jvps
from ..core.internals import (
    above_the_call,
    at_next_level,
    batched_for_random_numbers,
    decomposes_by,
    in_clean_state,
    in_functorch,
    innermost_is_jvp,
    inside_of_batched_gradients,
    is_traced_to_graph,
    modes_are_active,
    only_autograd,
    outside_of_batched_gradients,
    own_levels_are_open,
    primal,
    saved_tensors_unhooked,
    skipped_by_dynamo,
    transforms_in_dual_level,
    unwrap_if_dead,
)
from ..core.schema import Signature
from .functions import Values, placed

__all__ = ["Batched", "Metadata", "Program", "call", "filled", "is_smooth", "node_of"]

_numbers = itertools.count(1)
_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()

_library = torch.library.Library("manualgrad_programs", "FRAGMENT")
_library.define("call(int program, Tensor[] tensors, bool keeps) -> Tensor[]")
_call: Any = torch.ops.manualgrad_programs.call.default
_library.define("node(int program, Tensor[] tensors, bool keeps) -> Tensor[]")
_node: Any = torch.ops.manualgrad_programs.node.default  # like `_call`, and one node of a trace

_in_graphs: list[Program] = []  # kept for graphs, which have only the numbers of programs


class Metadata(NamedTuple):
    """Metadata of an input or a result, instead of a tensor that is not kept."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Metadata:
        """The metadata of a tensor."""
        return cls(tuple(x.shape), x.dtype, x.device)

    def without(self, dim: int | None) -> Metadata:
        """The metadata of an element of a batch along ``dim``."""
        return self if dim is None else self._replace(shape=(*self.shape[:dim], *self.shape[dim + 1 :]))


def is_smooth(x: Tensor | Metadata) -> bool:
    """Whether it has floating point or complex numbers."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def filled(values: Sequence[Tensor | None], like: Sequence[Tensor | Metadata]) -> list[Any]:
    """Cotangents or tangents, with zeros instead of None; those of integers remain None.

    Args:
        values: the cotangents or tangents.
        like: their primals.
    """

    def zeros(x: Tensor | Metadata) -> Tensor:
        return torch.zeros_like(x) if isinstance(x, Tensor) else torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    return [zeros(x) if v is None and is_smooth(x) else v for v, x in zip(values, like)]


class Program:
    """A function of tensors with rules.

    Attributes:
        number: identifies the program to the operator.
        rule_of_its_own: the name of a rule that may differ from the derivative of `run`; "" if there is none.
        is_solver: whether what `run` calls depends on values. It is then one node of a trace, whose results are `like`
            others, and `run` is called without autocast.
        is_traced: whether the program belongs to a graph, as one node.
    """

    rule_of_its_own = ""
    is_solver = False
    is_traced = False

    def __init__(self) -> None:
        self.number = next(_numbers)
        _programs[self.number] = self

    def run(self, tensors: Values) -> list[Tensor]:
        """The results, then the values kept for the backward. None shares memory with another, or is an argument."""
        raise NotImplementedError

    def run_alone(self, tensors: Values) -> list[Tensor]:
        """The results, if nothing is differentiated; the values that `run` returns after them are not read."""
        return self.run(tensors)

    def like(self, tensors: Values) -> Values:
        """Tensors with the shapes and dtypes of the results of a solver."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """The number of results of the last `run`."""
        raise NotImplementedError

    def batched(self, dims: Sequence[int | None], size: int, randomness: str) -> Program:
        """The program for each element of a batch: see `Batched`."""
        return Batched(self, dims, size, randomness)

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        """The results and kept values (``count`` in all), and the inputs, that the rule for the vjp reads."""
        raise NotImplementedError

    def vjp(
        self, xs: Sequence[Any], tensors: Sequence[Any], places: Sequence[int], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The cotangents of the tensors at ``places``; None is zero.

        Args:
            xs: the results, then the kept values; `Metadata` of those that the rule does not read.
            tensors: the inputs; `Metadata` of those that the rule does not read.
            places: of the inputs whose cotangents are needed.
            grads: of ``xs``; None is zero.
        """
        raise NotImplementedError

    def jvp(
        self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool
    ) -> Sequence[Tensor | None]:
        """The tangents of the results, and if ``keeps`` those of the kept values; None is zero."""
        raise NotImplementedError


def call(program: Program, tensors: Values) -> list[Tensor]:
    """The results of a program, tracked at every level."""
    _refuse_nested(tensors)
    tensors = batched_for_random_numbers(tensors)  # the program runs outside of the batches of its arguments only
    # a tangent at a level is computed outside of the operator, from its results
    return list(_call(program.number, list(tensors), own_levels_are_open()))[: program.outputs]


def node_of(program: Program, tensors: Values) -> list[Tensor]:
    """Like `call`, but one operator for tracers. Lowering decomposes it, except for a solver."""
    _refuse_nested(tensors)
    _keep_for_graphs(program)
    return list(_node(program.number, list(tensors), False))[: program.outputs]


def _refuse_nested(tensors: Values) -> None:
    for x in tensors:
        if x.is_nested:
            raise NotImplementedError(
                f"expected dense tensors, got a nested tensor of layout {x.layout}: pass its values() to custom rules and "
                "solvers, and a torch_manualgrad.nested.Ragged to mg.checkpoint"
            )


def _keep_for_graphs(program: Program) -> None:
    if is_traced_to_graph():
        program.is_traced = True
        _in_graphs.append(program)


def _mapped(function: Callable[[Values], Sequence[Tensor | None]], dims: Any, values: Values, randomness: str) -> Any:
    """``function(values)`` under vmap. The batch is first in results; those that are None remain None."""
    missing: list[bool] = []

    def present(*values: Tensor) -> tuple[Tensor, ...]:
        found = function(values)
        missing[:] = [x is None for x in found]
        return tuple(x for x in found if x is not None)

    made = iter(torch.vmap(present, in_dims=tuple(dims), randomness=randomness)(*values))
    return [None if none else next(made) for none in missing]


class Batched(Program):
    """A program for each element of a batch.

    Args:
        one: the program.
        dims: of the batch in each tensor, or None.
        size: of the batch.
        randomness: as in ``torch.vmap``.
    """

    def __init__(self, one: Any, dims: Sequence[int | None], size: int, randomness: str) -> None:
        super().__init__()
        self.one, self.dims, self.size, self.randomness = one, tuple(dims), size, randomness

    @property
    def outputs(self) -> int:
        return self.one.outputs

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.one.needed(count, inputs)

    def run(self, tensors: Values) -> list[Tensor]:
        return _mapped(self.one.run, self.dims, tensors, self.randomness)

    def run_alone(self, tensors: Values) -> list[Tensor]:
        return _mapped(self.one.run_alone, self.dims, tensors, self.randomness)

    def jvp(
        self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool
    ) -> Sequence[Tensor | None]:
        n, m = len(xs), len(xs) + len(tensors)
        dims = [*[0] * n, *self.dims, *[self.dims[i] for i in places]]

        def rule(values: Values) -> Sequence[Tensor | None]:
            return self.one.jvp(values[:n], values[n:m], places, values[m:], keeps)

        return _mapped(rule, dims, [*xs, *tensors, *tangents], self.randomness)

    def vjp(
        self, xs: Sequence[Any], tensors: Sequence[Any], places: Sequence[int], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        n, m = len(xs), len(xs) + len(tensors)
        dims = [*[0] * n, *self.dims, *[0] * len(grads)]
        given: list[Any] = [*xs, *tensors, *grads]
        given = [x.without(d) if isinstance(x, Metadata) else x for x, d in zip(given, dims)]
        present = [i for i, x in enumerate(given) if isinstance(x, Tensor)]

        def rule(values: Values) -> Sequence[Tensor | None]:
            full = placed(given, present, values)
            return self.one.vjp(full[:n], full[n:m], places, full[m:])

        found = _mapped(rule, [dims[i] for i in present], [given[i] for i in present], self.randomness)
        over = [self.dims[i] for i in places]
        return [g if g is None else g.sum(0) if d is None else g.movedim(0, d) for g, d in zip(found, over)]


# -- the operator -----------------------------------------------------------------------------------------------------


class _Rule(Derivative):
    """The derivative of the operator: of the list of tensors, for the list of results."""

    pure = False

    def __init__(self, op: Any) -> None:
        super().__init__(op, Signature(op._schema))
        self.op = op

    def run_below(self, values: Sequence[Any]) -> Any:
        if self.op is _node:  # modes must see it
            return super().run_below([*values[:2], True])
        with torch.no_grad():
            return _programs[values[0]].run([x.detach() for x in values[1]])

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        return redispatch(self.op, self.signature, keyset, [values[0], list(values[1]), True])

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        program, (results,), tensors = _programs[inputs[0]], outputs, inputs[1]
        n, values = len(results), [*results, *tensors]
        xs, given = program.needed(n, len(tensors))
        kept = [*xs, *[n + i for i in given]]
        return [values[i] for i in kept], (program, [Metadata.of(x) for x in values], kept, n)

    def vjp(
        self, needed: Sequence[Any], tensors: Sequence[Tensor | None], static: Any, grads: Sequence[Any]
    ) -> Sequence[Any]:
        program, like, kept, n = static
        saved = [unwrap_if_dead(x) for x in tensors if x is not None]
        if only_autograd() and not torch.is_grad_enabled():
            saved = [x.detach() for x in saved]
        values = placed(like, kept, saved)
        places = [i for i, yes in enumerate(needed[1]) if yes]
        received = [i for i, g in enumerate(grads[0]) if g is not None]

        def rule(given: Values) -> Sequence[Tensor | None]:
            return program.vjp(values[:n], values[n:], places, placed([None] * n, received, given))

        with saved_tensors_unhooked():  # torch.func refuses to run under hooks
            found = _over_batches(rule, [grads[0][i] for i in received])
        return [None, placed([None] * (len(values) - n), places, found), None]

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        program, tensors, moving = _programs[inputs[0]], inputs[1], tangents[1]
        places = [i for i, t in enumerate(moving) if isinstance(t, Tensor)]
        if in_functorch() and not innermost_is_jvp():
            raise RuntimeError(
                "torch_manualgrad: a dual number that was made inside of torch.func.grad or vjp, with "
                "forward_ad.make_dual, has no derivative in a function with a custom rule or a solver; use torch.func.jvp"
            )

        def rule(xs: Values, tensors: Values, moving: Values) -> Sequence[Tensor | None]:
            return _over_batches(lambda moving: program.jvp(xs, tensors, places, moving, inputs[2]), moving)

        with saved_tensors_unhooked():
            # the rule starts transforms, which is impossible at this level, in the middle of the call
            found = at_next_level(rule, list(outputs[0]), list(tensors), [moving[i] for i in places])
        return [[*found, *[None] * (len(outputs[0]) - len(found))]]


def _over_batches(rule: Callable[[Values], Sequence[Tensor | None]], values: Values) -> Sequence[Tensor | None]:
    """``rule(values)``; for gradients batched by PyTorch (``is_grads_batched``), by torch.func.vmap."""
    outside, dims, level = outside_of_batched_gradients(values)
    if not level:
        return rule(values)
    found = _mapped(rule, dims, outside, "different")
    return [x if x is None else inside_of_batched_gradients([x], level)[0] for x in found]


def _autograd(rule: _Rule, keyset: Any, number: int, tensors: Values, keeps: bool) -> list[Tensor]:
    values = [number, list(tensors), keeps]
    mode = differentiated(rule.signature, values)
    if mode in (Mode.NOTHING, Mode.PLAIN_NOTHING):
        return redispatch(rule.op, rule.signature, keyset, values)
    if mode is Mode.DUAL:  # the kept values need tangents if this level also differentiates in reverse mode
        values[2] = keeps or any(x.requires_grad for x in tensors)
    found = apply(rule, keyset, mode, values)
    return list(found)


def _run(number: int, tensors: Values, keeps: bool) -> list[Tensor]:
    """The operators below autograd; tracers also trace it instead of `_node`."""
    program = _programs[number]
    run = program.run if keeps else program.run_alone
    if modes_are_active() and not program.is_solver:  # a tracer must see the operators that the program calls
        with above_the_call(), torch.no_grad():
            return run([x.detach() for x in tensors])
    # the function runs outside of all transforms and tangents, and untracked
    with in_clean_state(autocast=not program.is_solver), transforms_in_dual_level(), torch.no_grad():
        found = run([apart_from_levels(primal(x).detach()) for x in tensors])
    # the code around a node of a graph expects memory that is aligned, not a part of another tensor
    return [x.clone() if program.is_traced and x.storage_offset() else x for x in found]


def _fake(number: int, tensors: Values, keeps: bool) -> list[Tensor]:
    program = _programs[number]
    return [torch.empty_like(x) for x in program.like(tensors)] if program.is_solver else _run(number, tensors, keeps)


def _body(number: int, tensors: Values, keeps: bool) -> Any:
    return NotImplemented if _programs[number].is_solver else _run(number, tensors, keeps)


def _batch(op: Any, info: Any, in_dims: Any, number: int, tensors: Values, keeps: bool) -> Any:
    batched = _programs[number].batched(in_dims[1], info.batch_size, info.randomness)
    if op is _node:
        _keep_for_graphs(batched)
    found = list(op(batched.number, list(tensors), keeps))
    return found, [0] * len(found)


for _op in (_call, _node):
    _name, _rule = _op._schema.name.partition("::")[2], _Rule(_op)
    jvps[_op.name()] = _rule.jvp
    _library.impl(_name, skipped_by_dynamo(functools.partial(_autograd, _rule)), "Autograd", with_keyset=True)
    _library.impl(_name, skipped_by_dynamo(_run), "CompositeExplicitAutograd")
    torch.library.register_vmap(_op, functools.partial(_batch, _op), lib=_library)
decomposes_by(_call, skipped_by_dynamo(_run))
torch.library.register_fake(_node, _fake, lib=_library)
bodies[_node] = _body
