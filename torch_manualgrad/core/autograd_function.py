"""Autograd functions made of a `Derivative`: what runs forward, backward and with tangents, at one functorch level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .internals import (
    SingleLevelFunction as _SingleLevelFunction,
    below_autograd,
    constants_replicated,
    forward_ad_enabled,
    is_autocast_enabled,
    primal,
    set_autocast_off,
    skipped_by_dynamo,
    tangents_possible,
)
from .node_classes import function_name, show_saved
from .schema import flatten, is_differentiable, tensors_in, unflatten

if TYPE_CHECKING:
    from .autograd import Derivative

__all__ = [
    "Call",
    "SingleLevelFunction",
    "autograd_function",
    "fast_function",
    "function_class",
    "pull_back",
    "save",
    "saved",
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


class Call:
    """What one call hands to the autograd function beside the flat values.

    Attributes:
        keyset: of the call, for the redispatch.
        lengths: of the lists of tensors among the arguments; None where there are none.
        dual: whether an input has a tangent.
        plain: whether nothing but autograd is near.
        out_lengths: of the lists among the outputs; set by the forward.
    """

    __slots__ = ("dual", "keyset", "lengths", "out_lengths", "plain")

    def __init__(self, keyset: Any, lengths: Sequence[int | None] | None, dual: bool, plain: bool) -> None:
        self.keyset, self.lengths, self.dual, self.plain = keyset, lengths, dual, plain
        self.out_lengths: Sequence[int | None] | None = None


def autograd_function(derivative: Derivative) -> Any:
    """The autograd function of one derivative. Arguments and outputs are flat: lists stand as their elements."""
    signature = derivative.signature
    one_output = len(signature.returns) == 1 and not signature.output_lists
    all_differentiable = all(derivative.differentiable)

    def forward(ctx: Any, call: Call, *flat: Any) -> Any:
        values = flat if call.lengths is None else unflatten(flat, call.lengths)
        if call.plain:
            result = derivative.run_below(values)
            outputs = (result,) if one_output else signature.outputs(result)
            tensors, ctx.static = derivative.residuals(values, outputs)
        else:
            # This function has switched both modes off. What it computes has to be tracked for an outer functorch level,
            # or a second derivative loses the term that flows through a saved output.
            with torch.enable_grad(), forward_ad_enabled(True), below_autograd():
                result = derivative.redispatch(call.keyset, values)
                outputs = (result,) if one_output else signature.outputs(result)
                tensors, ctx.static = derivative.residuals(values, outputs)
        ctx.set_materialize_grads(False)
        if derivative.selective:
            needs = ctx.needs_input_grad[1:]
            tensors = derivative.kept(tensors, tuple(needs[i] for i in signature.tensor_like))
        save(ctx, tensors)
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
        if all(g is None for g in grads):  # undefined, which is zero
            return (None, *[None for _ in needed])
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
        # on primals, with forward mode switched on: an outer level may differentiate this formula again
        with forward_ad_enabled(True), set_autocast_off() if is_autocast_enabled() else nullcontext():
            known = [primal(next(saved)) if c is None else c[0] for c in ctx.constants]
            inputs: Sequence[Any] = known[: ctx.n_inputs]
            outputs: Sequence[Any] = known[ctx.n_inputs :]
            if ctx.lengths is not None:
                inputs, tangents = unflatten(inputs, ctx.lengths), tuple(unflatten(tangents, ctx.lengths))
            if ctx.out_lengths is not None:
                outputs = unflatten(outputs, ctx.out_lengths)
            with constants_replicated((*inputs, *outputs)):
                found = derivative.jvp(inputs, outputs, tangents)
        if ctx.out_lengths is not None:
            found = _spread(found, ctx.out_lengths)
        # autograd.Function takes no None for a floating output, and nothing else for one that is not differentiable
        smooth: Sequence[bool] = derivative.differentiable
        if ctx.out_lengths is not None:
            smooth = [yes for yes, n in zip(smooth, ctx.out_lengths) for _ in range(1 if n is None else n)]
        full = [
            None if not yes or isinstance(o, Tensor) and not is_differentiable(o) else _zero(o) if t is None else t
            for t, o, yes in zip(found, known[ctx.n_inputs :], smooth)
        ]
        return full[0] if one_output else tuple(full)

    return function_class(derivative, forward, backward, jvp)


def fast_function(
    derivative: Derivative, in_place: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None, others: int = 0
) -> Any:
    """The same for plain calls of an operator with one tensor as output and no lists: most calls, so with no detour.

    Args:
        derivative: of the operator.
        in_place: ``(values, tensors) -> result`` writes the result to one of the tensors.
        others: how many tensors there are beside those of the values; they get no gradient.
    """
    residuals, places = derivative.residuals, derivative.signature.tensor_like
    constants, selective = [None] * len(derivative.signature.names), derivative.selective

    def forward(ctx: Any, values: Any, *tensors: Any) -> Any:
        if in_place is None:
            result = derivative.run_below(values)
        else:
            result = in_place(values, tensors)
            ctx.mark_dirty(result)
        kept, ctx.static = residuals(values, (result,))
        save(ctx, derivative.kept(kept, ctx.needs_input_grad[1:]) if selective else kept)
        ctx.set_materialize_grads(False)
        return result

    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return (None,) * (1 + len(places) + others)
        needed: list[Any] = constants.copy()
        for i, wanted in zip(places, ctx.needs_input_grad[1:]):
            needed[i] = wanted
        found = pull_back(derivative, ctx, needed, (grad,))
        return (None, *[found[i] for i in places], *(None,) * others)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AssertionError("a plain call has no tangents")

    return function_class(derivative, forward, backward, jvp).apply


def function_class(derivative: Derivative, *methods: Callable[..., Any]) -> Any:
    """An autograd function whose node in the graph is called after the operator, as PyTorch's are."""
    members = {m.__name__: staticmethod(skipped_by_dynamo(m)) for m in methods}
    made: Any = type(function_name(derivative.signature), (_SingleLevelFunction,), members)
    made.call_backward_at_once()
    show_saved(made, derivative)
    return made


def save(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Save tensors for the backward. A node that saves none can run a second time, as PyTorch's can."""
    for x in tensors:
        if x is not None:
            ctx.save_for_backward(*tensors)
            return
    ctx.nothing_saved = tuple(tensors)


def saved(ctx: Any) -> tuple[Tensor | None, ...]:
    """What `save` has saved."""
    nothing = getattr(ctx, "nothing_saved", None)
    return ctx.saved_tensors if nothing is None else nothing


def pull_back(derivative: Derivative, ctx: Any, needed: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
    """The vjp without autocast, and below autograd if nobody is to differentiate it."""
    tensors: Sequence[Any] = saved(ctx)  # first: to read them may run any code of the user's, which no guard may reach
    if torch.compiler.is_dynamo_compiling():  # compiled autograd: the graph is traced, and guards are not
        return derivative.vjp(needed, tensors, ctx.static, grads)
    if is_autocast_enabled():
        with set_autocast_off():
            if derivative.one_precision:
                tensors, grads = _of_one_precision(tensors, grads)
            return derivative.vjp(needed, tensors, ctx.static, grads)
    if not derivative.pure or torch.is_grad_enabled() or tangents_possible((*tensors, *grads)):
        with constants_replicated((*tensors, *grads)):
            return derivative.vjp(needed, tensors, ctx.static, grads)
    with below_autograd():
        return derivative.vjp(needed, tensors, ctx.static, grads)


def _of_one_precision(tensors: Sequence[Any], grads: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """In the widest among them: under autocast an output may be narrower than the inputs, and formulas mix the two."""
    floating = [t for t in tensors_in((*tensors, *grads)) if is_differentiable(t)]
    real = {t.dtype.to_real() for t in floating}
    if len(real) < 2:
        return tensors, grads
    widest = functools.reduce(torch.promote_types, real)

    def wide(t: Any) -> Any:
        if isinstance(t, list):
            return [wide(x) for x in t]
        if not isinstance(t, Tensor) or not is_differentiable(t):
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


def _zero(output: Any) -> Tensor | None:
    return torch.zeros_like(output) if isinstance(output, Tensor) and is_differentiable(output) else None
