"""The short way of a call: one tensor in, one out, and nothing but autograd near.

Most calls of an overridden operator are of this kind, and a few microseconds of Python are more than their arithmetic.
What is bound by name elsewhere is picked by place here; the mathematics is the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from .autograd import function_class, pull_back
from .internals import below_autograd, is_autocast_enabled, only_autograd

if TYPE_CHECKING:
    from .rule import Bound

__all__ = ["short_call"]


def short_call(derivative: Bound) -> Callable[..., Any] | None:
    """``(args, kwargs, x) -> result`` with the derivative attached; None if the operator is of another kind.

    The caller has made sure that ``x``, the only tensor and the first argument, is plain and requires grad, and that no
    transform and no dual level is near.
    """
    signature = derivative.signature
    if signature.tensor_like != [0] or signature.lists or len(signature.returns) != 1:
        return None
    if not signature.returns[0].is_tensor or not all(derivative.differentiable) or len(derivative.vjps) != 1:
        return None
    ((plan, _),) = derivative.vjps
    formula, pick = plan.call, plan.pick
    run, bind = derivative.run, signature.bind
    constants = _picker(derivative.constant_places)
    by_default = constants(signature.defaults)
    keeps = (0 in derivative.tensor_places, len(signature.names) in derivative.tensor_places)  # the input, the output
    needed = [True] + [None] * (len(signature.names) - 1)

    def forward(ctx: Any, args: Any, kwargs: Any, x: Any) -> Any:
        with below_autograd():
            result = run(*args, **kwargs)
        if keeps == (True, True):
            ctx.save_for_backward(x, result)
        else:
            ctx.save_for_backward(*[t for t, kept in zip((x, result), keeps) if kept])
        ctx.static = by_default if len(args) == 1 and not kwargs else constants(bind(args, kwargs))
        return result

    def backward(ctx: Any, grad: Any) -> Any:
        if torch.is_grad_enabled() or is_autocast_enabled() or not only_autograd():
            return None, None, pull_back(derivative, ctx, needed, (grad,))[0]
        with below_autograd():
            return None, None, formula(*pick((*ctx.saved_tensors, *ctx.static, grad, (True,))))

    return function_class(derivative, forward, backward).apply


def _picker(places: list[int]) -> Callable[[Any], Any]:
    """``places`` of a sequence, as a tuple whatever their number."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda known: (known[places[0]],)) if places else lambda known: ()
