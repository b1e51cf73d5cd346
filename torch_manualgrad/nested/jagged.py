"""The fast path of a call on a jagged nested tensor: one node of autograd's graph, from buffer to buffer.

It serves calls that need only autograd, of functions that act on each position along the ragged dim separately. A backward
that is tracked, or whose cotangent has another structure, is computed on nested tensors (``_Call.tracked``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.engine.node import level_function
from ..core.internals import (
    PLAIN,
    JaggedStructure,
    below_autograd,
    entry,
    is_autocast_enabled,
    is_plain_jagged,
    jagged_nested,
    jagged_structure,
    only_autograd,
    set_autocast_off,
)
from .backward import BACKWARD
from .conversion import on_nested, same_structure
from .layer_normalization import layer_norm_backward_again
from .ragged import Ragged

__all__ = ["JAGGED", "has_plain_buffer", "is_untracked", "jagged_call"]

Gradients = Sequence[Tensor | None]


class _Call(NamedTuple):
    """A call, in terms of the buffer.

    Attributes:
        forward: ``(values, *parameters) -> (result, residuals)``.
        backward: ``(grad, needed, *residuals) -> gradients`` of values and parameters.
        tracked: ``(grad, needed, x, *residuals) -> gradients`` of nested tensors, with derivatives, by `backward`.
        of_result: whether ``x`` of ``tracked`` is the result instead of the argument.
        parameters: the dense arguments, or None.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]
    backward: Callable[..., Gradients]
    tracked: Callable[..., Gradients]
    of_result: bool = False
    parameters: tuple[Tensor | None, ...] = ()


def _on_buffer() -> Callable[..., Any]:
    """The autograd function of these calls: ``(call, nested, *parameters) -> nested``."""

    def forward(ctx: Any, call: _Call, x: Any, *parameters: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)  # nested tensors of zeros do not exist
        structure = jagged_structure(x)
        with below_autograd():
            values, residuals = call.forward(x._values, *parameters)
        result = jagged_nested(values, structure)
        # dense tensors first: they report an in-place change, which a nested tensor cannot
        ctx.save_for_backward(*residuals, result if call.of_result else x)
        ctx.call, ctx.structure = call._replace(parameters=()), structure
        return result

    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        needed, structure, (*residuals, nested) = ctx.needs_input_grad[1:], ctx.structure, ctx.saved_tensors
        if is_untracked(grad, structure):
            with below_autograd():
                found = [*ctx.call.backward(grad._values, needed, *residuals)]
            found[0] = None if found[0] is None else jagged_nested(found[0], structure)
        else:
            with set_autocast_off():
                found = [*ctx.call.tracked(grad, needed, nested, *residuals)]
        return None, *found

    apply: Callable[..., Any] = level_function("_OnBuffer", forward=forward, backward=backward).apply
    return apply


_apply = _on_buffer()


def is_untracked(grad: Any, structure: JaggedStructure) -> bool:
    """Whether a backward is not tracked and its cotangent has the structure of the result."""
    plain = not torch.is_grad_enabled() and only_autograd() and is_plain_jagged(grad)
    return plain and same_structure(jagged_structure(grad), structure)


def has_plain_buffer(x: Any) -> bool:
    """Whether a call on ``x`` needs nothing but autograd: ``x`` is PyTorch's jagged tensor of real floats."""
    if not is_plain_jagged(x) or not only_autograd() or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or is_autocast_enabled():
        return False
    values = x._values
    return type(values) in PLAIN and values.is_floating_point()


def jagged_call(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a call by the fast path.

    Args:
        name: of the aten operator, one of `JAGGED`.
        x: the nested argument.
        args: the other arguments.
        kwargs: the keyword arguments.

    Returns:
        The result; None if the fast path does not take the call.
    """
    if not has_plain_buffer(x):
        return None
    call = JAGGED[name](x, *args, **kwargs)
    if call is None or any(p is not None and (type(p) not in PLAIN or p.is_nested) for p in call.parameters):
        return None
    shared = any(p is not None and p.requires_grad for p in call.parameters)
    if not (x.requires_grad or shared) or (shared and jagged_structure(x).lengths is not None):
        return None  # gradients of parameters must leave out holes
    return _apply(call, x, *call.parameters)


# -- the calls --------------------------------------------------------------------------------------------------------

_gelu_backward = entry(torch.ops.aten.gelu_backward.default)
_softmax_backward = entry(torch.ops.aten._softmax_backward_data.default)
_layer_norm_backward = entry(torch.ops.aten.native_layer_norm_backward.default)


def _with_result(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    result = function(values)
    return result, (result,)


def _gelu(x: Any, *, approximate: str = "none") -> _Call:
    return _Call(
        lambda v: (F.gelu(v, approximate=approximate), (v,)),
        lambda g, needed, v: (_gelu_backward(g, v, approximate=approximate),),
        lambda grad, needed, x, _: (BACKWARD["gelu_backward"](grad, x, approximate=approximate),),
    )


def _softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> _Call | None:
    at, values = dim % (x._values.dim() + 1), x._values
    if dtype is not None or at in (0, x._ragged_idx) or not -values.dim() - 1 <= dim <= values.dim():
        return None
    return _Call(
        functools.partial(_with_result, lambda v: torch.softmax(v, at - 1)),
        lambda g, needed, y: (_softmax_backward(g, y, at - 1, y.dtype),),
        lambda grad, needed, y, _: (BACKWARD["_softmax_backward_data"](grad, y, at, y.dtype),),
        of_result=True,
    )


@on_nested
def _layer_norm_again(
    grad: Ragged, x: Ragged, needed: Sequence[bool], weight: Any, bias: Any, shape: Sequence[int], eps: float
) -> Any:
    of_values, *rest = layer_norm_backward_again(needed, grad.values, (x.values, weight, bias, None, None), shape, eps)
    return None if of_values is None else x.like(of_values), *rest


def _layer_norm(
    x: Any,
    normalized_shape: Sequence[Any],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: Any = None,
) -> _Call | None:
    values, shape = x._values, list(normalized_shape)
    behind = values.dim() + 1 - len(shape)
    if behind <= x._ragged_idx or list(values.shape[behind - 1 :]) != shape:
        return None
    if any(p is not None and list(p.shape) != shape for p in (weight, bias)):
        return None

    def forward(v: Tensor, *parameters: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        result, mean, rstd = torch.native_layer_norm(v, shape, parameters[0], parameters[1], eps)
        return result, (v, mean, rstd, *parameters)

    def backward(
        g: Tensor, needed: Sequence[bool], v: Tensor, m: Tensor, r: Tensor, *parameters: Tensor | None
    ) -> Gradients:
        found: Gradients = _layer_norm_backward(g, v, shape, m, r, *parameters, needed)
        return found

    def tracked(
        grad: Any, needed: Sequence[bool], x: Any, v: Tensor, m: Tensor, r: Tensor, *parameters: Tensor | None
    ) -> Gradients:
        found: Gradients = _layer_norm_again(grad, x, needed, *parameters, shape, eps)
        return found

    return _Call(forward, backward, tracked, parameters=(weight, bias))


JAGGED: dict[str, Callable[..., _Call | None]] = {
    "gelu": _gelu,
    "softmax.int": _softmax,
    "layer_norm": _layer_norm,
}
