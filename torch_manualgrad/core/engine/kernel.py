"""The autograd kernel: one for custom ops and for overridden operators of aten.

A kernel at the dispatcher key Autograd checks whether anything is differentiated at this functorch level. If so, it
applies an autograd function that acts only on this level and redispatches below autograd. The mathematics comes from a
`Derivative`, which is looked up at every call.

A kernel registered at the key is reached from everywhere, unlike a wrapper: composite callers, C++, a functorch
transform at any depth, and the tracers of the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..internals import PLAIN, enable_single_level_autograd_function, has_tangent, only_autograd, tangents_possible
from ..schema import Signature, flatten, tensors_in, unflatten
from .derivative import Derivative
from .node import Call, functions

__all__ = ["Mode", "any_tangent", "apply", "differentiated"]


class Mode(Enum):
    """The modes in which a call is differentiated, at this functorch level."""

    NOTHING = 0
    REVERSE = 1
    DUAL = 2  # an input has a tangent
    # the first two for plain calls, without a transform, tangent or tracer: the fast path
    PLAIN_NOTHING = 3
    PLAIN_REVERSE = 4


def any_tangent(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors is a dual tensor at this level."""
    return tangents_possible(tensors) and any(has_tangent(t) for t in tensors)


def differentiated(signature: Signature, values: Sequence[Any]) -> Mode:
    """The mode in which a call with these values is differentiated, at this level."""
    grad, plain = False, only_autograd()
    for i in signature.tensor_like:
        value = values[i]
        for x in (value,) if not isinstance(value, (list, tuple)) else value:
            if type(x) not in PLAIN:
                if not isinstance(x, Tensor):  # None, or a Python number for a Tensor of the schema
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
    """The operator with its derivative attached, at this level.

    Args:
        derivative: of the operator.
        keyset: of the call.
        mode: the result of `differentiated` for the values; not a mode without differentiation.
        values: the arguments, as from `Signature.bind`.

    Returns:
        The operator's result.
    """
    made, signature = functions(derivative), derivative.signature
    if mode is Mode.PLAIN_REVERSE and made.plain is not None:
        return made.plain(values, *[values[i] for i in signature.tensor_like])
    lengths = None
    if signature.lists:
        values, lengths = flatten(values, signature.lists)
    call = Call(keyset, lengths, mode is Mode.DUAL, mode is Mode.PLAIN_REVERSE)
    if call.plain:
        result = made.general(call, *values)
    else:
        with enable_single_level_autograd_function():
            result = made.general(call, *values)
    if call.out_lengths is None:
        return result
    outputs = unflatten(result, call.out_lengths)
    return tuple(outputs) if len(signature.returns) > 1 else outputs[0]
