"""The fast path of a call: plain tensors in and out, no lists of them, and nothing but autograd near.

Most calls of an overridden operator are of this kind, and a few microseconds of Python are more than their arithmetic.
What is bound by name elsewhere is picked by place here; the mathematics is the same formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from .autograd_function import function_class, pull_back, save, saved
from .internals import below_autograd, is_autocast_enabled, only_autograd

if TYPE_CHECKING:
    from .bound import Bound

__all__ = ["fast_call", "picker"]


def fast_call(derivative: Bound) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """``(values, *tensors) -> result`` with the derivative attached, and its backward.

    None if the operator is of another kind. The values are the arguments as `Signature.bind` gives them, the tensors
    those among them, for autograd to see. The caller has made sure that these are plain, that one of them requires grad,
    and that no transform and no dual level is near.
    """
    signature = derivative.signature
    places, returns = signature.tensor_like, signature.returns
    if signature.lists or signature.output_lists or not all(r.is_tensor for r in returns):
        return None, None
    run, vjp = derivative.run_below, derivative.vjp
    one_output = len(returns) == 1
    fixed = [i for i, yes in enumerate(derivative.differentiable) if not yes]
    tensors, constants = picker(derivative.tensor_places), picker(derivative.constant_places)
    facts, selective = derivative.fact_functions, derivative.selective
    nothing: list[Any] = [None] * len(signature.names)
    others = 1 + len(places)
    alone = derivative.bare and not derivative.checked and places == [0] and len(derivative.vjps) == 1
    one_formula = derivative.vjps[0][0] if alone else None

    def forward(ctx: Any, values: Any, *_: Any) -> Any:
        result = run(values)
        ctx.set_materialize_grads(False)
        if one_output:
            known = (*values, result)
        else:
            result = tuple(result)
            known = (*values, *result)
            if fixed:
                ctx.mark_non_differentiable(*[result[i] for i in fixed if result[i] is not None])
        kept = tensors(known)
        save(ctx, derivative.kept(kept, ctx.needs_input_grad[1:]) if selective else kept)
        ctx.static = constants(known)
        if facts:
            ctx.static += tuple([fact(known[i]) for i, fact in facts])
        return result

    def backward(ctx: Any, *grads: Any) -> Any:
        if one_formula is not None and not any(g is not None for g in grads):
            return (None,) * others
        needed = nothing.copy()
        for i, wanted in zip(places, ctx.needs_input_grad[1:]):
            needed[i] = wanted
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling or torch.is_grad_enabled() or is_autocast_enabled() or not only_autograd():
            result = pull_back(derivative, ctx, needed, grads)
            return (None, *[result[i] for i in places])
        kept = saved(ctx)  # first: to read them may run any code of the user's, which no guard may reach
        with below_autograd():
            if one_formula is not None:
                return None, one_formula((*kept, *ctx.static, *grads, (True,)))
            result = vjp(needed, kept, ctx.static, grads)
        return (None, *[result[i] for i in places])

    return function_class(derivative, forward, backward).apply, backward


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """``places`` of a tuple, as a tuple whatever their number; without a frame of Python."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
