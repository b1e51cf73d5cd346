"""Functions that inductor compiles, and whose derivatives are functions of the same kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..core import compile_cache
from ..core.engine.derivative import Derivative, redispatch
from ..core.engine.kernel import Mode, apply, differentiated
from ..core.engine.node import followed, functions, picker, pull_back, save, saved
from ..core.internals import (
    PLAIN,
    Sizes,
    below_autograd,
    compiler_lock,
    dual,
    has_tangent,
    in_clean_state,
    inside_of_batched_gradients,
    is_autocast_enabled,
    is_symbol,
    modes_are_active,
    only_autograd,
    outside_of_batched_gradients,
    set_autocast_off,
    tangent,
    values_hidden,
    version_of,
    without_first_call,
)
from ..core.override.override import active_rules
from ..core.schema import Signature
from . import calls, graphs, watching
from .lowering import by_inductor, by_operators
from .zeros import specialized

__all__ = ["Function", "Options", "Unsupported", "call", "lowerings"]

_library = torch.library.Library("manualgrad_compiled", "FRAGMENT")
_library.define("call(int function, Tensor[] tensors) -> Tensor[]")
call: Any = torch.ops.manualgrad_compiled.call.default
_call_signature = Signature(call._schema)


class Unsupported(RuntimeError):
    """A program that cannot be compiled. It runs uncompiled."""


class Options(NamedTuple):
    """How functions are compiled.

    Attributes:
        lowering: one of `lowerings`.
        fallback: run unsupported programs uncompiled, with a warning; otherwise raise.
        line: of the program, for reports.
    """

    lowering: str = "inductor"
    fallback: bool = True
    line: str = ""

    def report(self, what: str, error: Exception) -> None:
        """Warn about a part that is not compiled, or raise."""
        if not self.fallback:
            raise error
        text = str(error).strip().partition("\n")[0]
        watching.note_refusal(self.line, f"{what} ({type(error).__name__}: {text})")
        warnings.warn(f"torch_manualgrad: {what} ({type(error).__name__}: {text})", RuntimeWarning, stacklevel=3)


class Function:
    """A functional graph, compiled at its first run, and differentiated when a derivative is first needed.

    Autograd tracks a call at every level and in every mode, like an operator.

    Attributes:
        graph: of ATen operators, flat.
        name: for graph nodes and errors.
        views: the outputs that may share memory with an argument.
        is_served: whether the compiled library makes its calls.
        sizes: the open sizes of the graph.
        places: for each of these the argument and dimension that has it.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        fakes: Sequence[Any],
        sizes: Sizes,
        places: Sequence[tuple[int, int]],
        name: str,
        options: Options,
    ) -> None:
        self.graph, self.sizes, self.name, self.options = graphs.reshaping(graph), sizes, name, options
        self.places = tuple(places)
        self.uncompiled = False
        with sizes.mode:  # the values' own, because a traced one may be a view of another
            self.fakes = [torch.empty_strided(x.shape, _apart(x), dtype=x.dtype, device=x.device) for x in fakes]
        self.number = next(calls.numbers)
        calls.functions[self.number] = self
        self.outputs = len(graphs.outputs_of(graph))
        self.views = graphs.views_of_inputs(graph)
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None
        self._batchable: fx.GraphModule | None = None
        self._strides: list[tuple[int, ...]] = []
        self._dtypes = [x.dtype for x in fakes]
        self._last: tuple[tuple[int, ...], list[tuple[int, ...]]] = (), []
        self._made: dict[Any, Any] = {}
        arguments = [f"Tensor a{i}" for i in range(len(fakes))]
        returns = ", ".join(f"Tensor r{i}" for i in range(self.outputs))
        self.signature = Signature(f"manualgrad_compiled::{name}({', '.join(arguments)}) -> ({returns})")
        self.is_served = calls.note_function(self)

    # -- values -------------------------------------------------------------------------------------------------------

    def primal(self, *values: Any) -> tuple[Tensor, ...]:
        """The outputs, not tracked. Compiles the graph at the first call."""
        open_sizes = self.open_sizes(values)
        if self._run is None and self.sizes.allow(open_sizes):
            with compiler_lock():
                self._compile()
        if open_sizes and not self.sizes.allow(open_sizes):
            return self.closed([x.shape for x in values]).primal(*values)
        arguments, expected = list(values), self._strides
        if open_sizes:
            expected = self._strides_for(open_sizes)
        if [x.stride() for x in values] != expected or [x.dtype for x in values] != self._dtypes:
            for i, (x, strides, dtype) in enumerate(zip(values, expected, self._dtypes)):
                if x.stride() != strides or x.dtype != dtype:
                    arguments[i] = _restrided(x, strides, dtype)
        if open_sizes:
            arguments = [*open_sizes, *arguments]
        with set_autocast_off() if is_autocast_enabled() else nullcontext():
            outputs = tuple(self._run(arguments))  # type: ignore[misc]
        calls.share_versions(outputs, values)
        return outputs

    def apart(self, *values: Any) -> Any:
        """`primal` for an autograd function: no output is an input or another output, and a single output is not in a tuple."""
        outputs = self.primal(*values)
        if self.views or len({*map(id, values), *map(id, outputs)}) != len(values) + len(outputs):
            outputs = self._aliases(values, outputs)
        return outputs if len(outputs) != 1 else outputs[0]

    def _aliases(self, values: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        seen = {id(x) for x in values}
        made = list(outputs)
        for i, x in enumerate(outputs):
            if id(x) in seen or i in self.views:
                made[i] = torch.ops.aten.alias(x)
            seen.add(id(x))
        return tuple(made)

    def _compile(self) -> None:
        if self._run is not None:
            return
        with in_clean_state():
            try:
                run = lowerings[self.options.lowering](self)
            except Exception as error:
                if self.places:
                    self.sizes.refused = True
                    return
                self.options.report(f"{self.name} runs uncompiled", error)
                run = by_operators(self)
            watching.note_graph(self.options.line, self.name, self.graph)
            self._strides = [x.stride() for x in self.fakes]
            self._run = self._first_run(run)

    def _first_run(self, run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
        def first(values: list[Any]) -> Sequence[Any]:
            outputs = run(values)
            self._run = without_first_call(run)
            if self.is_served:
                calls.note_run(self.number, self._run)
            return outputs

        return first

    # -- open sizes ---------------------------------------------------------------------------------------------------

    def open_sizes(self, values: Sequence[Any]) -> tuple[int, ...]:
        """The open sizes, in a call."""
        return tuple([values[i].shape[d] for i, d in self.places]) if self.places else ()

    def allows(self, values: Sequence[Any]) -> bool:
        """Whether the traces for open sizes so far, derivatives included, are valid for a call."""
        return not self.places or self.sizes.allow(self.open_sizes(values))

    def closed(self, shapes: Sequence[Sequence[int]]) -> Function:
        """The function for arguments of these shapes alone, with no size left open."""
        if not self.places:
            return self
        key = "closed", tuple(map(tuple, shapes))
        if key not in self._made:
            with compiler_lock(), in_clean_state():
                if key in self._made:  # by another thread
                    return self._made[key]
                open_sizes = tuple([shapes[i][d] for i, d in self.places])
                strides, sizes = self._strides_for(open_sizes), Sizes()
                with sizes.mode:
                    fakes = [
                        torch.empty_strided(*layout, dtype=x.dtype, device=x.device)
                        for x, *layout in zip(self.fakes, key[1], strides)
                    ]
                graph = graphs.trace(self.graph, fakes, sizes.mode)
                self._made[key] = Function(graph, fakes, sizes, (), self.name, self.options)
        made: Function = self._made[key]
        return made

    def _strides_for(self, open_sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The strides of the arguments."""
        last = self._last  # another thread may replace it
        if last[0] != open_sizes:
            value = self.sizes.value
            last = open_sizes, [tuple([value(n, open_sizes) for n in x.stride()]) for x in self.fakes]
            self._last = last
        return last[1]

    # -- calls --------------------------------------------------------------------------------------------------------

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        """The outputs, tracked by autograd."""
        if values_hidden():
            if modes_are_active():
                return self.as_it_is(*values)
            return tuple(call(self.number, list(values)))
        if self.is_served and only_autograd() and all(type(x) in PLAIN for x in values):
            return tuple(calls.served(self.number, values))
        return self.in_python(*values)

    def in_python(self, *values: Any) -> tuple[Tensor, ...]:
        """`__call__` without the compiled library."""
        if only_autograd():
            plain = True
            needs = []
            for x in values:
                plain = plain and type(x) in PLAIN
                needs.append(x.requires_grad)
            if plain:
                if not torch.is_grad_enabled() or True not in needs:
                    return self.primal(*values)
                tower = None if self.uncompiled else self.tower(tuple(needs))
                if not self.allows(values):
                    return self.closed([x.shape for x in values])(*values)
                if tower is None and not self.uncompiled:  # no output has a derivative
                    with torch.no_grad():
                        return self.primal(*values)
                if tower is None:
                    return self.as_it_is(*values)
                made = functions(tower.derivative())
                result = made.plain(values, *values)
                return (result,) if self.outputs == 1 and isinstance(result, Tensor) else result[: self.outputs]
        return tuple(call(self.number, list(values)))

    def as_it_is(self, *values: Any) -> tuple[Tensor, ...]:
        """The graph, operator by operator, with the derivatives of the rules."""
        if self._batchable is None:
            self._batchable = graphs.batchable(self.graph)
        with active_rules():
            return tuple(self._batchable(*values))

    def tower(self, needs: tuple[bool, ...]) -> Tower | None:
        """The derivatives for these gradients; None without any, or if the function is `uncompiled` or must be
        `closed`."""
        key = compile_cache.state(), needs
        if key not in self._made:
            with compiler_lock(), in_clean_state(), active_rules():
                if key not in self._made:
                    try:
                        first = _level(self, needs)
                    except Exception as error:
                        first = None
                        if self.places:
                            self.sizes.refused = True
                        else:
                            self.options.report(f"{self.name} is differentiated uncompiled", error)
                            self.uncompiled = True
                    self._made[key] = None if first is None else Tower(self, needs, first)
        return self._made[key]

    def pushes(self, moving: tuple[int, ...]) -> None:
        """Trace the tangents of a call with these moving inputs; if that fails, the function runs uncompiled."""
        try:
            self.tangent(moving)
        except Exception as error:
            self.options.report(f"{self.name} is differentiated uncompiled", error)
            self.uncompiled = True

    def tangent(self, moving: tuple[int, ...]) -> tuple[Function, tuple[int, ...]]:
        """The function of the arguments, then of the tangents of some, and the outputs whose tangents it returns.

        It requires fixed sizes: see `closed`.
        """
        key = compile_cache.state(), "tangent", moving
        if key not in self._made:
            with compiler_lock(), in_clean_state(), active_rules():
                if key in self._made:  # by another thread
                    return self._made[key]
                graph, outputs = graphs.pushed_forward(self.graph, self.fakes, self.sizes.mode, moving)
                fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
                made = Function(graph, fakes, self.sizes, (), f"{self.name}_jvp", self.options)
                self._made[key] = made, outputs
        return self._made[key]

    def batched(self, dims: tuple[int | None, ...], size: int, randomness: str) -> Function:
        """The function of a batch, whose outputs have the batch first. It requires fixed sizes: see `closed`."""
        key = compile_cache.state(), "batch", dims, size, randomness
        if key not in self._made:
            with compiler_lock(), in_clean_state(), active_rules():
                if key in self._made:  # by another thread
                    return self._made[key]
                mode = self.sizes.mode
                fakes = [x if d is None else _with_batch(mode, x, d, size) for x, d in zip(self.fakes, dims)]
                graph = graphs.batched(self.graph, fakes, mode, dims, randomness)
                self._made[key] = Function(graph, fakes, self.sizes, (), f"{self.name}_batched", self.options)
        return self._made[key]

    def __repr__(self) -> str:
        return f"<compiled {self.name}: {len(self.fakes)} tensors -> {self.outputs}>"


#: How a function's graph is run, by name.
lowerings = {"inductor": by_inductor, "eager": by_operators}


def _with_batch(mode: Any, fake: Tensor, dim: int, size: int) -> Tensor:
    shape = list(fake.shape)
    shape.insert(dim, size)
    with mode:
        return torch.empty(shape, dtype=fake.dtype, device=fake.device)


def _apart(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, or those of a contiguous one if its elements may share memory."""
    strides, end = x.stride(), 1
    if torch.empty_like(x).stride() == strides:  # dense
        return strides
    gaps = not any(map(is_symbol, (*strides, *x.shape)))
    for stride, size in sorted(zip(strides, x.shape)) if gaps else ():
        if size != 1:
            gaps = gaps and stride >= end
            end = stride * size
    return strides if gaps else x.contiguous().stride()


def _restrided(x: Tensor, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)
    return made.copy_(x)


# -- reverse mode -----------------------------------------------------------------------------------------------------


class Level:
    """A function with its residuals among the outputs, and its backward."""

    def __init__(self, forward: Function, backward: Function, partition: graphs.Partition) -> None:
        self.forward, self.backward = forward, backward
        self.smooth, self.wanted, self.saved = partition.smooth, partition.wanted, partition.saved
        self.carried, self.reached = partition.carried, partition.reached
        self._made: dict[Any, tuple[Function, tuple[int, ...]]] = {}

    def backward_for(self, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> tuple[Function, tuple[int, ...]]:
        """The backward, for some cotangents and some gradients, and the gradients that it returns."""
        if (given, wanted) not in self._made:
            with compiler_lock(), in_clean_state():
                if (given, wanted) in self._made:  # by another thread
                    return self._made[given, wanted]
                whole, first = self.backward, len(self.saved)
                reached = frozenset().union(*[r for r, yes in zip(self.reached, given) if yes])
                returned = [yes and i in reached for i, yes in zip(self.wanted, wanted)]
                graph, kept = specialized(whole.graph, first, given, returned, whole.sizes, whole.places)
                fakes = [
                    *whole.fakes[:first],
                    *[x for x, yes in zip(whole.fakes[first:], given) if yes],
                    *whole.fakes[first + len(given) :],
                ]
                dropped = given.count(False)
                places = [(i, d) if i < first else (i - dropped, d) for i, d in whole.places]
                made = Function(graph, fakes, whole.sizes, places, whole.name, whole.options)
                self._made[given, wanted] = made, tuple(self.wanted[i] for i in kept)
        return self._made[given, wanted]


def _level(function: Function, needs: tuple[bool, ...]) -> Level | None:
    sizes, options = function.sizes, function.options
    partition = graphs.joint(function.graph, function.fakes, sizes, needs)
    if partition is None:
        return None
    residuals = graphs.residuals_of(partition)
    watching.note_residuals(options.line, function.name, residuals)
    forward = Function(partition.forward, function.fakes, sizes, function.places, function.name, options)
    inputs = [n.meta["val"] for n in partition.backward.graph.find_nodes(op="placeholder")]
    backward = Function(partition.backward, inputs, sizes, partition.places, f"{function.name}_backward", options)
    return Level(forward, backward, partition)


class Tower:
    """The reverse derivatives of a function with respect to the same inputs: of the function, of its residuals, of theirs.

    The backward of a backward gives cotangents to the residuals. The first time, a second run of the forward pulls them
    back; from then on the forward also saves the tensors for that.
    """

    def __init__(self, function: Function, needs: tuple[bool, ...], first: Level) -> None:
        self.function, self.needs = function, needs
        self.levels = [first]
        self.depth = 0
        self._derivatives: dict[tuple[int, bool], Compiled] = {}

    def derivative(self, dual: bool = False) -> Compiled:
        """The derivative of a call; ``dual`` if an input has a tangent."""
        key = self.depth, dual
        if key not in self._derivatives:
            with compiler_lock():
                if key not in self._derivatives:
                    self._derivatives[key] = Compiled(self, *key)
        return self._derivatives[key]

    def level(self, k: int) -> Level:
        """The function with the residuals of ``k`` levels as outputs."""
        while len(self.levels) <= k:
            with compiler_lock(), in_clean_state(), active_rules():
                if len(self.levels) <= k:
                    found = _level(self.levels[-1].forward, self.needs)
                    assert found is not None
                    self.levels.append(found)
        return self.levels[k]


class Compiled(Derivative):
    """The derivative of a compiled function that keeps the residuals of some levels.

    Residuals are differentiable outputs. Outputs that the program computes under ``torch.no_grad`` are not, but may
    have a tangent: these are `untracked`.
    """

    def __init__(self, tower: Tower, depth: int, dual: bool) -> None:
        self.tower, self.depth = tower, depth
        self.forward = tower.level(depth).forward
        own = tower.function.outputs
        self.bounds = [own, *[level.forward.outputs for level in tower.levels[:depth]]]
        self.untracked = [i for i in range(own) if i not in tower.levels[0].smooth]
        differentiable = [dual or i not in self.untracked for i in range(self.forward.outputs)]
        self.run = self.forward.apart
        saved = {place for level in tower.levels[: depth + 1] for place in level.saved}
        inputs, outputs = (sorted(i for where, i in saved if where == kind) for kind in ("input", "output"))
        self.of_inputs, self.of_outputs = inputs, outputs
        self._of_inputs, self._of_outputs = picker(inputs), picker(outputs)
        kept = {
            place: k for k, place in enumerate([*[("input", i) for i in inputs], *[("output", i) for i in outputs]])
        }
        self.saved_of_levels = [[kept[place] for place in level.saved] for level in tower.levels[: depth + 1]]
        self._of_level = [picker(places) for places in self.saved_of_levels]
        super().__init__(call, self.forward.signature, differentiable)
        self.number = -1 if dual else calls.note_rule(self)

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        found = tuple(redispatch(call, _call_signature, keyset, [self.forward.number, list(values)]))
        return found if len(found) > 1 else found[0]

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        inputs = tuple(inputs)
        return (*self._of_inputs(inputs), *self._of_outputs(outputs)), (inputs, [version_of(x) for x in inputs])

    def plain_bodies(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        residuals, run, one_output = self.residuals, self.run, self.forward.outputs == 1
        fixed = [i for i, yes in enumerate(self.differentiable) if not yes]

        def forward(ctx: Any, values: Any, *tensors: Any) -> Any:
            with below_autograd():
                result = run(*values)
            outputs = (result,) if one_output else result
            if fixed:
                ctx.mark_non_differentiable(*[outputs[i] for i in fixed])
            kept, ctx.static = residuals(values, outputs)
            save(ctx, kept)
            ctx.set_materialize_grads(False)
            return result

        def backward(ctx: Any, *grads: Any) -> Any:
            needed = followed(ctx)
            if all(g is None for g in grads):
                return (None, *[None for _ in needed])
            if is_autocast_enabled():
                return (None, *pull_back(self, ctx, needed, grads))
            return (None, *self.vjp(needed, saved(ctx), ctx.static, grads))

        return forward, backward

    def vjp(
        self, needed: Sequence[Any], tensors: Sequence[Tensor | None], static: Any, grads: Sequence[Any]
    ) -> Sequence[Any]:
        inputs, versions = static
        k = self._level_of(grads)
        if k <= self.depth:
            level = self.tower.level(k)
            saved = self._of_level[k](tensors)
        else:
            self._refuse_written(inputs, versions)
            level = self._further(k, inputs)
            outputs = level.forward(*inputs)
            saved = [inputs[i] if where == "input" else outputs[i] for where, i in level.saved]
        cotangents = [grads[i] if i < len(grads) else None for i in level.smooth]
        given = tuple(c is not None for c in cotangents)
        result: list[Any] = [None] * len(inputs)
        if True in given:
            backward, wanted = level.backward_for(given, tuple(bool(needed[i]) for i in level.wanted))
            arguments = [*saved, *[c for c in cotangents if c is not None]]
            if level.carried:
                open_sizes = self.forward.open_sizes(inputs)
                arguments += [graphs.carrier(open_sizes[i]) for i in level.carried]
            for i, g in zip(wanted, backward(*arguments)):
                result[i] = g
        return result

    def _further(self, k: int, inputs: Sequence[Tensor]) -> Level:
        """A level whose residuals the call has not saved."""
        forward, tower = self.forward, self.tower
        if forward.places:
            try:
                tower.level(k)
            except Exception:
                forward.sizes.refused = True
            if not forward.allows(inputs):
                closed = forward.closed([x.shape for x in inputs]).tower(tower.needs)
                if closed is None:
                    raise RuntimeError(f"{forward.name}: its derivative cannot be traced")
                return closed.levels[0]
        level = tower.level(k)
        tower.depth = max(tower.depth, k)
        return level

    def _refuse_written(self, inputs: Sequence[Tensor], versions: Sequence[int]) -> None:
        for i, (x, version) in enumerate(zip(inputs, versions)):
            if version_of(x) != version:
                raise RuntimeError(
                    f"{self.tower.function.name}: one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: input {i}, {list(x.shape)}, is at version {version_of(x)}; expected version {version} "
                    "instead"
                )

    def _level_of(self, grads: Sequence[Any]) -> int:
        """The first level whose outputs include all that have cotangents."""
        last = max(i for i, g in enumerate(grads) if g is not None)
        for k, bound in enumerate(self.bounds):
            if last < bound:
                return k
        return self.depth + 1

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        moving = tuple(i for i, t in enumerate(tangents) if isinstance(t, Tensor))
        function, places = self.forward.tangent(moving)
        found = function(*inputs, *[tangents[i] for i in moving]) if places else ()
        result: list[Any] = [None] * len(outputs)
        for i, t in zip(places, found):
            result[i] = t
        return result


class Forward(Derivative):
    """The derivative of a compiled function if no gradient is needed, and some input has a tangent."""

    def __init__(self, function: Function) -> None:
        self.forward = function
        self.run = function.apart
        super().__init__(call, function.signature)

    redispatch = Compiled.redispatch
    jvp = Compiled.jvp

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        return (), None


# -- the operator -----------------------------------------------------------------------------------------------------


def _autograd(keyset: Any, number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    function = calls.functions[number]
    values = list(tensors)
    mode = differentiated(function.signature, values)
    if mode in (Mode.NOTHING, Mode.PLAIN_NOTHING):
        return redispatch(call, _call_signature, keyset, [number, values])
    moves = mode is Mode.DUAL
    if moves and function.places:  # PyTorch reads the sizes of dual numbers as integers
        return _autograd(keyset, function.closed([x.shape for x in tensors]).number, tensors)
    needs = tuple(x.requires_grad for x in tensors)
    tower = function.tower(needs) if torch.is_grad_enabled() and True in needs and not function.uncompiled else None
    if moves and not function.uncompiled:
        function.pushes(tuple(i for i, x in enumerate(tensors) if has_tangent(x)))
    if function.uncompiled:
        return list(function.as_it_is(*tensors))
    if not function.allows(tensors):
        return _autograd(keyset, function.closed([x.shape for x in tensors]).number, tensors)
    if tower is None and not moves:
        return redispatch(call, _call_signature, keyset, [number, values])
    derivative = Forward(function) if tower is None else tower.derivative(moves)
    result = apply(derivative, keyset, Mode.REVERSE if mode is Mode.PLAIN_REVERSE else mode, values)
    outputs = list((result,) if isinstance(result, Tensor) else result)[: function.outputs]
    if moves:
        untracked = derivative.untracked if isinstance(derivative, Compiled) else range(len(outputs))
        for i in untracked:
            if outputs[i].requires_grad:
                outputs[i] = _untracked(outputs[i])
    return outputs


def _untracked(x: Tensor) -> Tensor:
    """A result that does not depend on tensors that require grad. Its tangent may: it keeps its history."""
    moving = tangent(x)
    return graphs.stop(x) if moving is None else dual(graphs.stop(x), moving)


def _batch(info: Any, in_dims: Any, number: int, tensors: Sequence[Tensor]) -> Any:
    shapes = [[n for i, n in enumerate(x.shape) if i != d] for x, d in zip(tensors, in_dims[1])]
    function = calls.functions[number].closed(shapes)
    batched = function.batched(tuple(in_dims[1]), info.batch_size, info.randomness)
    found = call(batched.number, list(tensors))
    return found, [0] * len(found)


def _kernel(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    found = calls.functions[number].apart(*tensors)
    return [found] if isinstance(found, Tensor) else list(found)


def _in_batched_gradients(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A call inside of ``is_grads_batched=True``, whose vmap is older than torch.func's."""
    function = calls.functions[number]
    if function.uncompiled:
        return list(function.as_it_is(*tensors))
    values, dims, level = outside_of_batched_gradients(tensors)
    shapes = [x.shape if d is None else x.shape[1:] for x, d in zip(values, dims)]
    size = next(x.shape[0] for x, d in zip(values, dims) if d == 0)
    batched = function.closed(shapes).batched(tuple(dims), size, "different")
    return inside_of_batched_gradients(call(batched.number, values), level)


def _uncompiled(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(calls.functions[number].as_it_is(*tensors))


_library.impl("call", _autograd, "Autograd", with_keyset=True)
_library.impl("call", _kernel, "CompositeExplicitAutograd")
_library.impl("call", _in_batched_gradients, "Batched")
torch.library.register_fake("manualgrad_compiled::call", _uncompiled, lib=_library)
torch.library.register_vmap("manualgrad_compiled::call", _batch, lib=_library)
