"""The autograd kernel: one for custom ops and for overridden operators of aten.

A kernel at the dispatcher key Autograd finds out whether anything is to be differentiated at this functorch level, and
if so applies an autograd function that acts on this level only and redispatches below autograd. The mathematics comes
from a `Derivative`, which is looked up at every call.

Registered at the key, and not wrapped around the call, it is reached from everywhere: composite callers, C++, a
functorch transform at any depth, and the tracers of the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from . import sharding
from .autograd_function import Call, autograd_function, fast_function
from .internals import (
    PLAIN,
    below_autograd,
    below_autograd_keys,
    enable_single_level_autograd_function,
    entry,
    has_tangent,
    only_autograd,
    python_function,
    tangents_possible,
)
from .schema import Signature, flatten, tensors_in, unflatten
from .transpose import transposed_jvp

__all__ = ["Derivative", "Mode", "any_tangent", "apply", "differentiated", "redispatch"]


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
    # for the commonest call: the values, and the tensors among them -> the result, with the derivative attached
    fast_call: Callable[..., Any] | None = None

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
        return autograd_function(self)

    @property
    def saved_names(self) -> tuple[tuple[str, ...], list[int], tuple[str, ...]]:
        """What nodes show as attributes: the saved tensors, which of these are lists, and the constants that are kept."""
        return (), [], ()

    @functools.cached_property
    def fast_function(self) -> Any:
        """That of plain calls; None for an operator of another kind."""
        returns = self.signature.returns
        simple = len(returns) == 1 and returns[0].is_tensor and not self.signature.lists
        return self.make_fast_function() if simple and all(self.differentiable) else None

    def make_fast_function(self) -> Any:
        """What `fast_function` is, where there is one."""
        return fast_function(self)

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
    # the first two where no transform, tangent or tracer is near: the fast path
    PLAIN_NOTHING = 3
    PLAIN_REVERSE = 4


def redispatch(op: Any, signature: Signature, keyset: Any, values: Sequence[Any]) -> Any:
    """The operator below autograd, at every key of the call that is below."""
    args, kwargs = signature.split(values)
    sharding.ensure_registered(op)
    with below_autograd():
        return op.redispatch(keyset & below_autograd_keys, *args, **kwargs)


def any_tangent(tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors is a dual tensor at this level."""
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
    """The operator with its derivative attached, at this level.

    Args:
        derivative: of the operator.
        keyset: of the call.
        mode: what `differentiated` says of the values; not one of the modes in which nothing is differentiated.
        values: the arguments as `Signature.bind` gives them.

    Returns:
        What the operator returns.
    """
    if mode is Mode.PLAIN_REVERSE and derivative.fast_function is not None:
        return derivative.fast_function(values, *[values[i] for i in derivative.signature.tensor_like])
    signature = derivative.signature
    lengths = None
    if signature.lists:
        values, lengths = flatten(values, signature.lists)
    call = Call(keyset, lengths, mode is Mode.DUAL, mode is Mode.PLAIN_REVERSE)
    if call.plain:
        result = derivative.function.apply(call, *values)
    else:
        with enable_single_level_autograd_function():
            result = derivative.function.apply(call, *values)
    if call.out_lengths is None:
        return result
    outputs = unflatten(result, call.out_lengths)
    return tuple(outputs) if len(signature.returns) > 1 else outputs[0]
