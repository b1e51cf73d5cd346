"""The operator behind functions with custom rules, and its derivatives in all modes.

A program is a function of tensors with rules for its vjp and its jvp. The operator runs it once, outside of all
transforms and under ``torch.no_grad()``, and applies the rule at each level that differentiates. The rules run on
tensors that are tracked at all other levels, so that higher derivatives are those of the rules.

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

__all__ = ["Metadata", "Program", "Values", "call", "node_of"]

Values = Sequence[Tensor]

_numbers = itertools.count(1)
_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()

_library = torch.library.Library("manualgrad_custom", "FRAGMENT")
_library.define("call(int program, Tensor[] tensors, bool keeps) -> Tensor[]")
_call: Any = torch.ops.manualgrad_custom.call.default
_library.define("node(int program, Tensor[] tensors, bool keeps) -> Tensor[]")
_node: Any = torch.ops.manualgrad_custom.node.default  # like `_call`, and one node of a trace

_in_graphs: list[Program] = []  # kept for graphs, which have only the numbers of programs


class Metadata(NamedTuple):
    """Metadata of an input or a result, which must not be kept itself."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Metadata:
        """The metadata of a tensor."""
        return cls(tuple(x.shape), x.dtype, x.device)

    @property
    def is_smooth(self) -> bool:
        """Whether it has floating point or complex numbers."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def zeros(self) -> Tensor:
        """A tensor of zeros like it."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Program:
    """A function of tensors with rules.

    Attributes:
        number: identifies the program to the operator.
        rule_of_its_own: the name of a rule that may differ from the derivative of `run`; "" if there is none.
    """

    rule_of_its_own = ""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _programs[self.number] = self

    def run(self, tensors: Values) -> list[Tensor]:
        """The results, then the values kept for the backward. None shares memory with another, or is an argument."""
        raise NotImplementedError

    def run_alone(self, tensors: Values) -> list[Tensor]:
        """The results, if nothing is differentiated; the values that `run` returns after them are not read."""
        return self.run(tensors)

    @property
    def outputs(self) -> int:
        """The number of results of the last `run`."""
        raise NotImplementedError

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        """The results and kept values (``count`` in all), and the inputs, that the rule for the vjp reads."""
        raise NotImplementedError

    def vjp(
        self,
        xs: Sequence[Tensor | None],
        like: Sequence[Metadata],
        tensors: Sequence[Tensor | None],
        inputs: Sequence[Metadata],
        places: Sequence[int],
        grads: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        """The cotangents of the tensors at ``places``; None is zero.

        Args:
            xs: the results, then the kept values; None for those that the rule does not read.
            like: the same, without their contents.
            tensors: the inputs; None for those that the rule does not read.
            inputs: the same, without their contents.
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
    tensors = batched_for_random_numbers(tensors)  # the program runs outside of the batches of its arguments only
    # a tangent at a level is computed outside of the operator, from its results
    return list(_call(program.number, list(tensors), own_levels_are_open()))[: program.outputs]


def node_of(program: Program, tensors: Values) -> list[Tensor]:
    """Like `call`, but one operator for tracers, which `_run` decomposes."""
    _in_graphs.append(program)
    return list(_node(program.number, list(tensors), False))[: program.outputs]


class Batched(Program):
    """A program for each element of a batch.

    Args:
        one: the program.
        dims: of the batch in each tensor, or None.
        size: of the batch.
        randomness: as in ``torch.vmap``.
    """

    def __init__(self, one: Program, dims: Sequence[int | None], size: int, randomness: str) -> None:
        super().__init__()
        self.one, self.dims, self.size, self.randomness = one, tuple(dims), size, randomness

    @property
    def outputs(self) -> int:
        return self.one.outputs

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.one.needed(count, inputs)

    def _map(self, function: Callable[..., Any], dims: Sequence[int | None], **options: Any) -> Callable[..., Any]:
        return torch.vmap(function, in_dims=tuple(dims), randomness=self.randomness, **options)

    def run(self, tensors: Values) -> list[Tensor]:
        return list(self._map(lambda *values: tuple(self.one.run(values)), self.dims)(*tensors))

    def run_alone(self, tensors: Values) -> list[Tensor]:
        return list(self._map(lambda *values: tuple(self.one.run_alone(values)), self.dims)(*tensors))

    def jvp(
        self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool
    ) -> Sequence[Tensor | None]:
        n, m = len(xs), len(tensors)
        missing: list[bool] = []

        def rule(*values: Tensor) -> tuple[Tensor, ...]:
            found = self.one.jvp(values[:n], values[n : n + m], places, values[n + m :], keeps)
            missing[:] = [t is None for t in found]
            return tuple(t for t in found if t is not None)

        dims = [*[0] * n, *self.dims, *[self.dims[i] for i in places]]
        found = iter(self._map(rule, dims)(*xs, *tensors, *tangents))
        return [None if none else next(found) for none in missing]

    def vjp(
        self,
        xs: Sequence[Tensor | None],
        like: Sequence[Metadata],
        tensors: Sequence[Tensor | None],
        inputs: Sequence[Metadata],
        places: Sequence[int],
        grads: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        inner = [_element(m, 0) for m in like]
        inside = [_element(m, d) for m, d in zip(inputs, self.dims)]
        given = [*xs, *tensors, *grads]
        dims = [0 if i < len(xs) or i >= len(xs) + len(tensors) else self.dims[i - len(xs)] for i in range(len(given))]
        present = [i for i, x in enumerate(given) if x is not None]
        missing: list[bool] = []

        def rule(*values: Tensor) -> tuple[Tensor, ...]:
            full: list[Any] = [None] * len(given)
            for i, x in zip(present, values):
                full[i] = x
            n, m = len(xs), len(xs) + len(tensors)
            found = self.one.vjp(full[:n], inner, full[n:m], inside, places, full[m:])
            missing[:] = [g is None for g in found]
            return tuple(g for g in found if g is not None)

        out = iter(self._map(rule, [dims[i] for i in present])(*[given[i] for i in present]))
        made: list[Tensor | None] = []
        for i, none in zip(places, missing):
            g, d = None if none else next(out), self.dims[i]
            made.append(g if g is None else g.sum(0) if d is None else g.movedim(0, d))
        return made


def _element(m: Metadata, dim: int | None) -> Metadata:
    if dim is None:
        return m
    shape = list(m.shape)
    del shape[dim]
    return m._replace(shape=tuple(shape))


# -- the operator -----------------------------------------------------------------------------------------------------


class _Rule(Derivative):
    """The derivative of the operator: of the list of tensors, for the list of results."""

    pure = False

    def __init__(self, op: Any) -> None:
        super().__init__(op, Signature(op._schema))
        self.op = op

    def run_below(self, values: Sequence[Any]) -> Any:
        with torch.no_grad():
            return _programs[values[0]].run([x.detach() for x in values[1]])

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        return redispatch(self.op, self.signature, keyset, [values[0], list(values[1]), True])

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        program, results, tensors = _programs[inputs[0]], outputs[0], inputs[1]
        xs, given = program.needed(len(results), len(tensors))
        like, inputs_like = [Metadata.of(x) for x in results], [Metadata.of(x) for x in tensors]
        return [*[results[i] for i in xs], *[tensors[i] for i in given]], (program, like, inputs_like, xs, given)

    def vjp(
        self, needed: Sequence[Any], tensors: Sequence[Tensor | None], static: Any, grads: Sequence[Any]
    ) -> Sequence[Any]:
        program, like, inputs_like, kept, given = static
        count = len(inputs_like)
        saved = [None if x is None else unwrap_if_dead(x) for x in tensors]
        if only_autograd() and not torch.is_grad_enabled():
            saved = [None if x is None else x.detach() for x in saved]
        xs: list[Tensor | None] = [None] * len(like)
        inputs: list[Tensor | None] = [None] * count
        for i, x in zip(kept, saved):
            xs[i] = x
        for i, x in zip(given, saved[len(kept) :]):
            inputs[i] = x
        places = [i for i, yes in enumerate(needed[1]) if yes]
        received = [i for i, g in enumerate(grads[0]) if g is not None]

        def rule(values: Values) -> Sequence[Tensor | None]:
            full: list[Tensor | None] = [None] * len(like)
            for i, g in zip(received, values):
                full[i] = g
            return program.vjp(xs, like, inputs, inputs_like, places, full)

        found: list[Any] = [None] * count
        with saved_tensors_unhooked():  # torch.func refuses to run under hooks
            for i, g in zip(places, _over_batches(rule, [grads[0][i] for i in received])):
                found[i] = g
        return [None, found, None]

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        program, tensors, moving = _programs[inputs[0]], inputs[1], tangents[1]
        places = [i for i, t in enumerate(moving) if isinstance(t, Tensor)]
        if in_functorch() and not innermost_is_jvp():
            raise RuntimeError(
                "torch_manualgrad: a dual number that was made inside of torch.func.grad or vjp, with "
                "forward_ad.make_dual, has no derivative in a function with a custom rule; use torch.func.jvp"
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
    missing: list[bool] = []

    def filled(*values: Tensor) -> tuple[Tensor, ...]:
        found = rule(values)
        missing[:] = [g is None for g in found]
        return tuple(g for g in found if g is not None)

    found = torch.vmap(filled, in_dims=tuple(dims), randomness="different")(*outside)
    made = iter(inside_of_batched_gradients(found, level))
    return [None if none else next(made) for none in missing]


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
    if modes_are_active():  # a tracer must see the operators that the program calls
        with above_the_call(), torch.no_grad():
            return run([x.detach() for x in tensors])
    # the function runs outside of all transforms and tangents, and untracked
    with in_clean_state(autocast=True), transforms_in_dual_level(), torch.no_grad():
        return run([apart_from_levels(primal(x).detach()) for x in tensors])


def _batch(op: Any, info: Any, in_dims: Any, number: int, tensors: Values, keeps: bool) -> Any:
    batched = Batched(_programs[number], in_dims[1], info.batch_size, info.randomness)
    if op is _node:
        _in_graphs.append(batched)
    found = list(op(batched.number, list(tensors), keeps))
    return found, [0] * len(found)


for _op in (_call, _node):
    _name, _rule = _op._schema.name.partition("::")[2], _Rule(_op)
    jvps[_op.name()] = _rule.jvp
    _library.impl(_name, skipped_by_dynamo(functools.partial(_autograd, _rule)), "Autograd", with_keyset=True)
    _library.impl(_name, skipped_by_dynamo(_run), "CompositeExplicitAutograd")
    torch.library.register_vmap(_op, functools.partial(_batch, _op), lib=_library)
decomposes_by(_call, skipped_by_dynamo(_run))
torch.library.register_fake(_node, _run, lib=_library)
bodies[_node] = _run
