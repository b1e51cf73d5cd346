"""The in-place form of an operator: ``x.renorm_(...)`` for ``x.renorm(...)``.

PyTorch differentiates it by a separate formula. Under a rule it is the functional operator, with the rule's derivative,
and its result is copied into the tensor: autograd can differentiate a copy. Plain calls write to the tensor directly,
so that a saved result is the tensor itself, and keep a copy of its old values only if the rule reads them.

An operand may share memory with the written tensor, as in ``x.mul_(x)``. PyTorch's forward mode then computes the
tangent from overwritten values, and so does reverse mode of lists (the ``_foreach`` operators). Such an operand is
copied first, even without a rule. One that shares only a part of its memory is refused, see `overlap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.kernel import Mode, differentiated
from ..engine.node import function_class, functions, plain_function
from ..internals import below_autograd, is_recorded_by_jit, is_view, operators, storage_of
from ..overlap import refuse_partial_overlap
from ..rule.definition import Rule
from ..rule.derivative import RuleDerivative
from ..schema import Signature, is_dense, is_differentiable, tensors_in, with_tensors
from .forward_mode import ForwardMode

__all__ = ["InPlace", "in_place_kernel", "in_place_operator", "reading_written"]


class InPlace(NamedTuple):
    """An in-place operator and its functional form, which has the same arguments."""

    op: Any
    functional: Any


def in_place_form(functional: Any) -> Any | None:
    """The ``OpOverload`` with ``_`` appended to the name and the same arguments, which writes to the first, or None."""
    return (_form_in_aten if functional.namespace == "aten" else _find_form)(functional)


def _find_form(functional: Any) -> Any | None:
    namespace, _, name = functional._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    wanted = _arguments(functional)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        if _arguments(op) == wanted and op._schema.arguments[0].alias_info:
            return op
    return None


_form_in_aten = functools.cache(_find_form)  # other libraries may add operators later


def _arguments(op: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def in_place_operator(rule: Rule | ForwardMode) -> Any | None:
    """The ``OpOverload`` that writes the rule's result into its first argument, and returns it, or None."""
    if len(rule.signature.returns) != 1 or not rule.signature.arguments[0].is_tensor:
        return None  # lists of tensors stay PyTorch's
    return in_place_form(rule.aten)


def reading_written(rules: Iterable[Rule]) -> list[InPlace]:
    """The operators whose derivative in PyTorch may read overwritten values.

    These are operators of several tensors whose derivative depends on one of them, and operators of several lists.
    """
    found = []
    for rule in rules:
        if len(rule.signature.tensor_like) > 1 and not {n for key in rule.vjp for n in key}.isdisjoint(rule.residuals):
            if (op := in_place_operator(rule)) is not None:
                found.append(InPlace(op, rule.aten))
    return [*found, *_of_lists()]


@functools.cache
def _of_lists() -> list[InPlace]:
    found = []
    for op in operators("aten", lambda schema: not schema.is_mutable, prefix="_foreach_", out=False):
        signature = Signature(op._schema)
        if len(signature.tensor_like) > 1 and (form := in_place_form(op)) is not None:
            found.append(InPlace(form, op))
    return found


def in_place_kernel(
    functional: Any,
    op: Any,
    stock: Callable[..., Any],
    active: Callable[[], RuleDerivative | ForwardMode | None],
    copies_operands: Callable[[], bool] = bool,
) -> Callable[..., Any]:
    """The kernel for the in-place operator at the dispatcher key Autograd, to be registered with its keyset.

    Args:
        functional: its functional form.
        op: the in-place operator.
        stock: PyTorch's own kernel, ``(keyset, *args, **kwargs) -> result``. It takes the call if nothing is
            differentiated, no rule is active, or the result does not fit into the written tensor.
        active: the derivative of the rule, or the way of forward mode, that is active now; None if neither is.
        copies_operands: whether operands that share memory with the written tensor are copied even without an active
            rule.

    Returns:
        ``(keyset, *args, **kwargs) -> the written tensor``.
    """
    signature = Signature(functional._schema)
    written = signature.names[0]
    of_list = not signature.arguments[0].is_tensor

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        derivative = None if of_list else active()
        if is_recorded_by_jit() or derivative is None and not copies_operands():
            return stock(keyset, *args, **kwargs)
        values = with_tensors(signature, signature.bind(args, kwargs))
        dense = all(x.layout is torch.strided and not x.is_nested for x in tensors_in(values[:1]))
        mode = differentiated(signature, values) if dense else Mode.NOTHING
        if mode in (Mode.NOTHING, Mode.PLAIN_NOTHING):
            return stock(keyset, *args, **kwargs)
        if derivative is None:
            # reverse mode of one tensor raises in the backward
            if mode is Mode.DUAL or of_list:
                if not of_list:
                    refuse_partial_overlap(op, signature, values)
                args, kwargs = signature.split(_with_copies(signature, values))
            return stock(keyset, *args, **kwargs)
        target = values[0]
        if mode is Mode.PLAIN_REVERSE and any(s == 0 and n > 1 for n, s in zip(target.shape, target.stride())):
            return stock(keyset, *args, **kwargs)  # an expanded tensor: most operators refuse it, and index_put_ warns
        refuse_partial_overlap(op, signature, values)
        if isinstance(derivative, ForwardMode):
            keeps = True
        else:
            at_once = mode is Mode.PLAIN_REVERSE and _takes_any_result(target, values)
            if at_once:
                shared = _reading_what_is_written(values)
                if any(x.requires_grad for x in shared):
                    return stock(
                        keyset, *args, **kwargs
                    )  # PyTorch decides which of these it refuses, at once or in the backward
                if shared:
                    values = _with_copies(signature, values)
                derivative = derivative.in_place(values)
            keeps = written in derivative.saved
            if at_once and (write := _function(derivative, op, keeps)) is not None:
                if not keeps:
                    return write(values, *[values[i] for i in signature.tensor_like])
                values = [target.clone(), *values[1:]]
                return write(values, *[values[i] for i in signature.tensor_like], target)
        # a backward must not read the written tensor; the copy also writes to the tangent, which a backward may read at
        # this level or an outer one
        copied = keeps or mode is not Mode.PLAIN_REVERSE
        if mode is not Mode.PLAIN_REVERSE:
            values = _with_copies(signature, values)
        inputs, named = signature.split([target.clone() if copied else target, *values[1:]])
        result = functional(*inputs, **named)
        if result.shape != target.shape:  # PyTorch's addbmm_ enlarges a view over memory outside of it
            raise RuntimeError(
                f"{op.name()}: output with shape {list(target.shape)} doesn't match the broadcast shape {list(result.shape)}"
            )
        if result.dtype != target.dtype:
            return stock(keyset, *args, **kwargs)
        return target.copy_(result)

    return kernel


def _with_copies(signature: Signature, values: Sequence[Any]) -> list[Any]:
    """The values, with a copy of every operand on the storage of a written tensor."""
    written = {storage._cdata for x in tensors_in(values[:1]) if (storage := storage_of(x)) is not None}

    def safe(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [safe(y) for y in x]
        if not isinstance(x, Tensor) or (storage := storage_of(x)) is None or storage._cdata not in written:
            return x
        return x.clone()

    found = list(values)
    for i in signature.tensor_like:
        if i:
            found[i] = safe(values[i])
    return found


def _takes_any_result(target: Tensor, values: Sequence[Any]) -> bool:
    """Whether the result has its dtype, and the write affects no other tensor's autograd."""
    if not is_differentiable(target) or is_view(target) or target.is_leaf and target.requires_grad:
        return False
    return all(is_dense(x) and (x.dtype is target.dtype or not is_differentiable(x)) for x in tensors_in(values[1:]))


def _reading_what_is_written(values: Sequence[Any]) -> list[Tensor]:
    """The arguments that share memory with the result."""
    written = values[0].untyped_storage().data_ptr()
    return [x for x in tensors_in(values[1:]) if x.untyped_storage().data_ptr() == written]


def _function(derivative: RuleDerivative, op: Any, keeps: bool) -> Callable[..., Any] | None:
    found = derivative.in_place_functions  # stored there, because the rule of the derivative may be released
    if (op, keeps) not in found:
        found[op, keeps] = _made(derivative, op, keeps)
    return found[op, keeps]


def _made(derivative: RuleDerivative, op: Any, keeps: bool) -> Callable[..., Any] | None:
    """``(values, *tensors) -> the written tensor``; None if the rule has its own primal.

    If the derivative keeps the old values, they are among ``values``, and the last tensor is written to.
    """
    if derivative.forward is not None or functions(derivative).plain is None:
        return None

    def write(values: Sequence[Any], tensors: Sequence[Any]) -> Any:
        args, kwargs = derivative.signature.split([tensors[-1 if keeps else 0], *values[1:]])
        with below_autograd():
            return op(*args, **kwargs)

    return function_class(derivative, *plain_function(derivative, write, others=int(keeps))).apply
