"""The autograd kernel: one for custom ops and for overridden operators of aten.

A kernel at the dispatcher key Autograd finds out whether anything is to be differentiated at this functorch level, and
if so applies an autograd function that acts on this level only and redispatches below autograd. The mathematics comes
from a `Derivative`, which is looked up at every call.

Registered at the key, and not wrapped around the call, it is reached from everywhere: composite callers, C++, a
functorch transform at any depth, and the tracers of the compiler.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .gradients import explain
from .internals import (
    PLAIN,
    SingleLevelFunction as _SingleLevelFunction,
    below_autograd,
    below_autograd_keys,
    enable_single_level_autograd_function,
    entry,
    forward_ad_enabled,
    fresh_variable,
    has_tangent,
    is_autocast_enabled,
    only_autograd,
    primal,
    python_function,
    set_autocast_off,
    tangents_possible,
)
from .schema import Signature, flatten, tensors_in, unflatten

__all__ = [
    "Derivative",
    "Mode",
    "SingleLevelFunction",
    "any_tangent",
    "apply",
    "differentiated",
    "function_class",
    "function_name",
    "pull_back",
    "redispatch",
    "transposed_jvp",
    "transposing",
]


class SingleLevelFunction(_SingleLevelFunction):
    """``torch.autograd.Function`` for use inside an `impl_autograd`, where it acts on one functorch level.

    Write it as any autograd function, in either style; its ``forward`` calls ``op.below_autograd(...)``. Its ``jvp``
    finds primals in ``ctx.saved_tensors``, and may be differentiated again.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "jvp" in cls.__dict__:
            rule = cls.jvp

            @functools.wraps(rule)
            def jvp(ctx: Any, *tangents: Any) -> Any:
                context = _Primals(ctx)
                with forward_ad_enabled(True):
                    return rule(context, *tangents)

            cls.jvp = staticmethod(jvp)  # type: ignore[method-assign]


class _Primals:
    """The context of a jvp, with the tangents of this level taken off what it saved."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._saved = ctx.saved_tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(t if t is None else primal(t) for t in self._saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class Derivative:
    """What is registered for one operator: residuals, vjp and jvp, all in terms of ``values`` (see `schema`).

    Attributes:
        differentiable: for each output, whether it is; integer outputs never are.
        pure: the vjp uses no autograd inside, and may run below it.
    """

    pure = True
    selective = False  # `kept` leaves some tensors out
    one_precision = False  # under autocast the vjp is given all in the widest precision among it
    run: Any = None  # the forward of a plain call, below autograd; by default the operator
    # for the commonest call: the values -> the result, with the derivative attached
    fast_call: Callable[[Sequence[Any]], Any] | None = None

    def __init__(self, op: Any, signature: Signature, differentiable: Sequence[bool] | None = None) -> None:
        self.op = op
        self.signature = signature
        self.differentiable = tuple(differentiable or [True] * len(signature.returns))
        if self.run is None:
            self.run = python_function(op) or entry(op)

    # Made at the first call: most rules of a process are never used, and classes take long to make.
    @functools.cached_property
    def function(self) -> Any:
        """The autograd function of any call."""
        return _autograd_function(self)

    @functools.cached_property
    def fast_function(self) -> Any:
        """That of plain calls; None for an operator of another kind."""
        returns = self.signature.returns
        simple = len(returns) == 1 and returns[0].is_tensor and not self.signature.lists
        return _fast_function(self) if simple and all(self.differentiable) else None

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        """What the backward needs: tensors, which go through autograd's own saving, and anything else."""
        raise NotImplementedError

    def kept(self, tensors: Sequence[Any], needs: tuple[bool, ...]) -> Sequence[Any]:
        """The tensors, with None for those that no gradient needs; ``needs`` says it of each input that is a tensor."""
        return tensors

    def vjp(
        self, needed: Sequence[Any], tensors: Sequence[Tensor | None], static: Any, grads: Sequence[Any]
    ) -> Sequence[Any]:
        """One gradient for each value; ``needed`` and the result have a list where the argument is one."""
        raise NotImplementedError

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """One tangent for each output. By default derived from `vjp`."""
        return transposed_jvp(self, inputs, outputs, tangents)

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        """The forward, below autograd."""
        return redispatch(self.op, self.signature, keyset, values)

    def run_below(self, values: Sequence[Any]) -> Any:
        """The forward of a plain call, below autograd.

        With every value given: a default is the schema's, and ``torch.<name>`` may have another.
        """
        args, kwargs = self.signature.split(values)
        with below_autograd():
            return self.run(*args, **kwargs)


class Mode(Enum):
    """What a call is differentiated for, at this functorch level."""

    NOTHING = 0
    REVERSE = 1
    DUAL = 2  # an input has a tangent
    # the first two where no transform, tangent or tracer is near: the short way
    PLAIN_NOTHING = 3
    PLAIN_REVERSE = 4


class _Call:
    """What one call hands to the autograd function beside the flat values."""

    __slots__ = ("dual", "keyset", "lengths", "out_lengths", "plain")

    def __init__(self, keyset: Any, lengths: Sequence[int | None] | None, mode: Mode) -> None:
        self.keyset = keyset
        self.lengths = lengths
        self.dual = mode is Mode.DUAL
        self.plain = mode is Mode.PLAIN_REVERSE
        self.out_lengths: Sequence[int | None] | None = None


def redispatch(op: Any, signature: Signature, keyset: Any, values: Sequence[Any]) -> Any:
    args, kwargs = signature.split(values)
    with below_autograd():
        return op.redispatch(keyset & below_autograd_keys, *args, **kwargs)


def any_tangent(tensors: Sequence[Tensor]) -> bool:
    return tangents_possible(tensors) and any(has_tangent(t) for t in tensors)


def differentiated(signature: Signature, values: Sequence[Any]) -> Mode:
    """What a call with these values is to be differentiated for, at this level."""
    grad, plain = False, only_autograd()
    for i in signature.tensor_like:
        value = values[i]
        for x in (value,) if not isinstance(value, (list, tuple)) else value:
            if type(x) not in PLAIN:
                if not isinstance(x, Tensor):  # None, or a Python number where the schema says Tensor
                    continue
                plain = False
            if x.requires_grad:
                grad = True
    grad = grad and torch.is_grad_enabled()
    if plain:
        return Mode.PLAIN_REVERSE if grad else Mode.PLAIN_NOTHING
    if any(has_tangent(x) for x in tensors_in(values)):
        return Mode.DUAL
    return Mode.REVERSE if grad else Mode.NOTHING


def apply(derivative: Derivative, keyset: Any, mode: Mode, values: Sequence[Any]) -> Any:
    """The operator with its derivative attached, at this level; ``values`` as `Signature.bind` gives them."""
    if mode is Mode.PLAIN_REVERSE and derivative.fast_function is not None:
        return derivative.fast_function(values, *[values[i] for i in derivative.signature.tensor_like])
    signature = derivative.signature
    lengths = None
    if signature.lists:
        values, lengths = flatten(values, signature.lists)
    call = _Call(keyset, lengths, mode)
    if call.plain:
        result = derivative.function.apply(call, *values)
    else:
        with enable_single_level_autograd_function():
            result = derivative.function.apply(call, *values)
    if call.out_lengths is None:
        return result
    outputs = unflatten(result, call.out_lengths)
    return tuple(outputs) if len(signature.returns) > 1 else outputs[0]


def _autograd_function(derivative: Derivative) -> Any:
    """The autograd function of one derivative. Arguments and outputs are flat: lists stand as their elements."""
    signature = derivative.signature
    one_output = len(signature.returns) == 1 and not signature.output_lists
    all_differentiable = all(derivative.differentiable)

    def forward(ctx: Any, call: _Call, *flat: Any) -> Any:
        values = flat if call.lengths is None else unflatten(flat, call.lengths)
        if call.plain:
            result = derivative.run_below(values)
            outputs = (result,) if one_output else signature.outputs(result)
            tensors, ctx.static = derivative.residuals(values, outputs)
        else:
            # This function has switched both modes off. An outer functorch level needs its history recorded, or a
            # second derivative loses the term that flows through a saved output.
            with torch.enable_grad(), forward_ad_enabled(True), below_autograd():
                result = derivative.redispatch(call.keyset, values)
                outputs = (result,) if one_output else signature.outputs(result)
                tensors, ctx.static = derivative.residuals(values, outputs)
        ctx.set_materialize_grads(False)
        if derivative.selective:
            needs = ctx.needs_input_grad[1:]
            tensors = derivative.kept(tensors, tuple(needs[i] for i in signature.tensor_like))
        ctx.save_for_backward(*tensors)
        ctx.lengths = call.lengths
        flat_outputs: Sequence[Any] = outputs
        if signature.output_lists:
            flat_outputs, call.out_lengths = flatten(outputs, signature.output_lists)
        ctx.out_lengths = call.out_lengths
        if call.dual:  # only then: it would keep every input alive until the backward
            ctx.save_for_forward(*[v for v in (*flat, *flat_outputs) if isinstance(v, Tensor)])
            ctx.n_inputs = len(flat)
            ctx.constants = [None if isinstance(v, Tensor) else (v,) for v in (*flat, *flat_outputs)]
        if not all_differentiable:
            ctx.mark_non_differentiable(*tensors_in(o for o, yes in zip(outputs, derivative.differentiable) if not yes))
        return result if one_output else tuple(flat_outputs)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        if ctx.out_lengths is not None:
            grads = tuple(unflatten(grads, ctx.out_lengths))
        if ctx.lengths is not None:
            needed = unflatten(needed, ctx.lengths)
        found = pull_back(derivative, ctx, needed, grads)
        if ctx.lengths is not None:
            found = _spread(found, ctx.lengths)
        return (None, *found)

    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        # on primals, with the recording of tangents on: an outer level may differentiate this formula again
        with forward_ad_enabled(True), set_autocast_off() if is_autocast_enabled() else nullcontext():
            known = [primal(next(saved)) if c is None else c[0] for c in ctx.constants]
            inputs: Sequence[Any] = known[: ctx.n_inputs]
            outputs: Sequence[Any] = known[ctx.n_inputs :]
            if ctx.lengths is not None:
                inputs, tangents = unflatten(inputs, ctx.lengths), tuple(unflatten(tangents, ctx.lengths))
            if ctx.out_lengths is not None:
                outputs = unflatten(outputs, ctx.out_lengths)
            found = derivative.jvp(inputs, outputs, tangents)
        if ctx.out_lengths is not None:
            found = _spread(found, ctx.out_lengths)
        # autograd.Function takes no None for a floating output, and nothing else for one that is not differentiable
        smooth: Sequence[bool] = derivative.differentiable
        if ctx.out_lengths is not None:
            smooth = [yes for yes, n in zip(smooth, ctx.out_lengths) for _ in range(1 if n is None else n)]
        full = [
            None if not yes else _zero(o) if t is None else t for t, o, yes in zip(found, known[ctx.n_inputs :], smooth)
        ]
        return full[0] if one_output else tuple(full)

    return function_class(derivative, forward, backward, jvp)


def _fast_function(derivative: Derivative) -> Any:
    """The same for plain calls of an operator with one tensor as output and no lists: most calls, so with no detour."""
    run, residuals, places = derivative.run_below, derivative.residuals, derivative.signature.tensor_like
    constants, selective = [None] * len(derivative.signature.names), derivative.selective

    def forward(ctx: Any, values: Any, *_: Any) -> Any:
        result = run(values)
        tensors, ctx.static = residuals(values, (result,))
        ctx.save_for_backward(*(derivative.kept(tensors, ctx.needs_input_grad[1:]) if selective else tensors))
        ctx.set_materialize_grads(False)
        return result

    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return (None, *[None for _ in places])
        needed: list[Any] = constants.copy()
        for i, wanted in zip(places, ctx.needs_input_grad[1:]):
            needed[i] = wanted
        found = pull_back(derivative, ctx, needed, (grad,))
        return (None, *[found[i] for i in places])

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AssertionError("a plain call has no tangents")

    return function_class(derivative, forward, backward, jvp).apply


def function_class(derivative: Derivative, *methods: Callable[..., Any]) -> Any:
    """An autograd function whose node in the graph is called after the operator, as PyTorch's are."""
    return type(
        function_name(derivative.signature), (_SingleLevelFunction,), {m.__name__: staticmethod(m) for m in methods}
    )


def function_name(signature: Signature) -> str:
    """The autograd function's name; its node is called the same, with "Backward" after it."""
    words = signature.name.split("::")[-1].removesuffix("_forward").split("_")
    return "".join(word[:1].upper() + word[1:] for word in words)


def pull_back(derivative: Derivative, ctx: Any, needed: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
    """The vjp without autocast, and below autograd if nobody is to differentiate it."""
    tensors = ctx.saved_tensors  # first: to read them may run any code of the user's, which no guard may reach
    if torch.compiler.is_dynamo_compiling():  # compiled autograd: the graph is traced, and guards are not
        return derivative.vjp(needed, tensors, ctx.static, grads)
    if is_autocast_enabled():
        with set_autocast_off():
            if derivative.one_precision:
                tensors, grads = _of_one_precision(tensors, grads)
            return derivative.vjp(needed, tensors, ctx.static, grads)
    if not derivative.pure or torch.is_grad_enabled() or tangents_possible(tensors):
        return derivative.vjp(needed, tensors, ctx.static, grads)
    with below_autograd():
        return derivative.vjp(needed, tensors, ctx.static, grads)


def _of_one_precision(tensors: Sequence[Any], grads: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """In the widest among them: under autocast an output may be narrower than the inputs, and formulas mix the two."""
    floating = [t for t in (*tensors, *grads) if isinstance(t, Tensor) and _differentiable(t)]
    real = {t.dtype.to_real() for t in floating}
    if len(real) < 2:
        return tensors, grads
    widest = functools.reduce(torch.promote_types, real)

    def wide(t: Any) -> Any:
        if not isinstance(t, Tensor) or not _differentiable(t):
            return t
        return t.to(widest.to_complex() if t.is_complex() else widest)

    return [wide(t) for t in tensors], [wide(g) for g in grads]


def _spread(values: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    """`flatten` for gradients and tangents, where None may stand for a whole list."""
    flat: list[Any] = []
    for value, length in zip(values, lengths):
        if length is None:
            flat.append(value)
        else:
            flat += [None] * length if value is None else value
    return flat


def transposed_jvp(
    derivative: Derivative, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """The jvp that belongs to a vjp.

    ``v -> vjp(v)`` is linear, so its own vjp, at the tangents, is the jvp: two reverse passes, exact, and
    differentiable again. Plain autograd at this level, not torch.func.vjp: the functorch layer is in the middle of
    this call.

    Raises:
        RuntimeError: the backward returns a gradient that autograd cannot follow back to the cotangent.
    """
    signature = derivative.signature
    cotangents: list[Any] = []
    for output, yes in zip(outputs, derivative.differentiable):
        one = [fresh_variable(o) if yes and _differentiable(o) else None for o in tensors_in([output])]
        cotangents.append(one if isinstance(output, (list, tuple)) else one[0] if one else None)
    needed = [[t is not None for t in ts] if isinstance(ts, list) else ts is not None for ts in tangents]
    variables = [v for v in _leaves(cotangents) if v is not None]
    with torch.enable_grad(), _transposing():
        tensors, static = derivative.residuals(inputs, outputs)
        try:
            grads = derivative.vjp(needed, tensors, static, cotangents)
        except Exception as error:
            text = f"{signature.name} has no jvp, and this was raised while one was derived from its backward."
            explain(error, f"{text} Register a jvp, or write the backward in differentiable operations.")
            raise
        pairs = []
        for name, grad, tangent in zip(signature.names, grads, tangents):
            grad = [None] * len(tangent) if grad is None and isinstance(tangent, list) else grad
            for g, t in zip(_leaves([grad]), _leaves([tangent])):
                if g is None or t is None:
                    continue
                if not g.requires_grad:
                    raise RuntimeError(
                        f"{signature.name}: no jvp is registered, and none can be derived from its backward: the "
                        f"gradient that it returns for '{name}' does not depend differentiably on the cotangent. "
                        "Register a jvp, write the backward in differentiable operations, or return None for a "
                        "gradient that is zero."
                    )
                pairs.append((g, t))
        if not pairs or not variables:
            return [[None] * len(c) if isinstance(c, list) else None for c in cotangents]
        found = torch.autograd.grad(
            [g for g, _ in pairs], variables, [t for _, t in pairs], create_graph=True, allow_unused=True
        )
    results = iter(found)
    return [
        [None if v is None else next(results) for v in c]
        if isinstance(c, list)
        else None
        if c is None
        else next(results)
        for c in cotangents
    ]


_here = threading.local()


@contextmanager
def _transposing() -> Iterator[None]:
    before, _here.transposing = transposing(), True
    try:
        yield
    finally:
        _here.transposing = before


def transposing() -> bool:
    """Whether this thread records a backward in order to transpose it."""
    return getattr(_here, "transposing", False)


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _zero(output: Any) -> Tensor | None:
    return torch.zeros_like(output) if isinstance(output, Tensor) and _differentiable(output) else None


def _leaves(values: Sequence[Any]) -> list[Any]:
    return [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value])]
