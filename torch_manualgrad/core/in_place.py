"""The in-place form of an operator that has a rule: ``x.renorm_(...)`` beside ``x.renorm(...)``.

PyTorch differentiates it by a formula of its own. Under a rule it is the functional operator, with the rule's
derivative, whose result is copied into the tensor: autograd knows what a copy is. Plain calls write to the tensor at once,
so that a result that is kept is the tensor itself, and keep a copy of what stood there only where the rule reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .autograd import Mode, differentiated
from .autograd_function import fast_function
from .forward_mode import ForwardMode
from .internals import below_autograd, is_recorded_by_jit, is_view
from .schema import Signature, is_dense, is_differentiable, tensors_in, with_tensors

if TYPE_CHECKING:
    from .bound import Bound
    from .rule import Rule

__all__ = ["in_place_kernel", "in_place_operator"]


def in_place_operator(rule: Rule | ForwardMode) -> Any | None:
    """The ``OpOverload`` that writes the rule's result into its first argument; None if there is none.

    It has the rule's name with ``_`` after it, the same overload and the same arguments, and returns the first.
    """
    namespace, _, rest = rule.name.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    op = getattr(packet, overload or "default", None)
    if op is None or len(rule.signature.returns) != 1 or not op._schema.arguments[0].alias_info:
        return None
    if not rule.signature.arguments[0].is_tensor:  # a list of tensors stays PyTorch's
        return None
    same = [(a.name, str(a.type)) for a in op._schema.arguments]
    return op if same == [(a.name, str(a.type)) for a in rule.aten._schema.arguments] else None


def in_place_kernel(
    functional: Any, op: Any, stock: Callable[..., Any], active: Callable[[], Bound | ForwardMode | None]
) -> Callable[..., Any]:
    """The kernel for the in-place operator at the dispatcher key Autograd, to be registered with its keyset.

    Args:
        functional: the operator that has the rule.
        op: the one in place.
        stock: PyTorch's own kernel, ``(keyset, *args, **kwargs) -> result``. It takes the call where nothing is
            differentiated, no rule is active, or the result does not fit into what it is to be written to.
        active: the derivative of the rule, or the way of forward mode, that is active now; None if neither is.

    Returns:
        ``(keyset, *args, **kwargs) -> the tensor that was written to``.
    """
    signature = Signature(functional._schema)
    written = signature.names[0]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        derivative = active()
        if derivative is None or is_recorded_by_jit():
            return stock(keyset, *args, **kwargs)
        values = with_tensors(signature, signature.bind(args, kwargs))
        target = values[0]
        dense = target.layout is torch.strided and not target.is_nested
        mode = differentiated(signature, values) if dense else Mode.NOTHING
        if mode in (Mode.NOTHING, Mode.PLAIN_NOTHING):
            return stock(keyset, *args, **kwargs)
        if isinstance(derivative, ForwardMode):
            keeps = True
        else:
            at_once = mode is Mode.PLAIN_REVERSE and _takes_any_result(target, values)
            if at_once:
                if _reads_what_it_writes(values):
                    return stock(keyset, *args, **kwargs)
                derivative = derivative.in_place(values)
            keeps = written in derivative.saved
            if at_once and (write := _function(derivative, op, keeps)) is not None:
                if not keeps:
                    return write(values, *[values[i] for i in signature.tensor_like])
                values = [target.clone(), *values[1:]]
                return write(values, *[values[i] for i in signature.tensor_like], target)
        # what a backward reads must not be what is written to; the copy also writes to the tangent, which one may read, at
        # this level or at one that is further out
        copied = keeps or mode is not Mode.PLAIN_REVERSE
        inputs, named = signature.split([target.clone() if copied else target, *values[1:]])
        result = functional(*inputs, **named)
        if (result.dtype, result.shape) != (target.dtype, target.shape):
            return stock(keyset, *args, **kwargs)
        return target.copy_(result)

    return kernel


def _takes_any_result(target: Tensor, values: Sequence[Any]) -> bool:
    """Whether the result is of its dtype, and nobody but autograd of this tensor has to know that it was written to."""
    if not is_differentiable(target) or is_view(target) or target.is_leaf and target.requires_grad:
        return False
    return all(is_dense(x) and (x.dtype is target.dtype or not is_differentiable(x)) for x in tensors_in(values[1:]))


def _reads_what_it_writes(values: Sequence[Any]) -> bool:
    """Whether an argument lies where the result will; PyTorch knows which of these it refuses, at once or in the backward."""
    written = values[0].untyped_storage().data_ptr()
    return any(x.untyped_storage().data_ptr() == written for x in tensors_in(values[1:]))


@functools.cache
def _function(derivative: Bound, op: Any, keeps: bool) -> Callable[..., Any] | None:
    """``(values, *tensors) -> the tensor that was written to``; None where the rule has a primal of its own.

    Where the derivative keeps what stood there, that is among the values, and the last of the tensors is written to.
    """
    if derivative.forward is not None or derivative.fast_function is None:
        return None

    def write(values: Sequence[Any], tensors: Sequence[Any]) -> Any:
        args, kwargs = derivative.signature.split([tensors[-1 if keeps else 0], *values[1:]])
        with below_autograd():
            return op(*args, **kwargs)

    return fast_function(derivative, write, others=int(keeps))
