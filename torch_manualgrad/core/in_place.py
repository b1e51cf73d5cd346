"""The in-place form of an operator that has a rule: ``x.renorm_(...)`` beside ``x.renorm(...)``.

PyTorch differentiates it by a formula of its own. Under a rule it is the functional operator, with the rule's
derivative, whose result is copied into the tensor: autograd knows what a copy is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .autograd import Mode, differentiated
from .internals import is_recorded_by_jit
from .rule import Rule
from .schema import Signature, with_tensors

__all__ = ["in_place_kernel", "in_place_operator"]


def in_place_operator(rule: Rule) -> Any | None:
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
    functional: Any, stock: Callable[..., Any], residuals: Callable[[], Sequence[str] | None]
) -> Callable[..., Any]:
    """The kernel for the in-place operator at the dispatcher key Autograd, to be registered with its keyset.

    Args:
        functional: the operator that has the rule.
        stock: PyTorch's own kernel, ``(keyset, *args, **kwargs) -> result``. It takes the call where nothing is
            differentiated, no rule is active, or the result does not fit into what it is to be written to.
        residuals: the names of what the rule that is active now keeps for its backward; None if no rule is.

    Returns:
        ``(keyset, *args, **kwargs) -> the tensor that was written to``.
    """
    signature = Signature(functional._schema)
    written = signature.names[0]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        kept = residuals()
        if kept is None or is_recorded_by_jit():
            return stock(keyset, *args, **kwargs)
        values = with_tensors(signature, signature.bind(args, kwargs))
        target = values[0]
        dense = target.layout is torch.strided and not target.is_nested
        mode = differentiated(signature, values) if dense else Mode.NOTHING
        if mode in (Mode.NOTHING, Mode.PLAIN_NOTHING):
            return stock(keyset, *args, **kwargs)
        # what a backward reads must not be what is written to; the copy also writes to the tangent, which one may read
        copied = written in kept or mode is Mode.DUAL
        inputs, named = signature.split([target.clone() if copied else target, *values[1:]])
        result = functional(*inputs, **named)
        if (result.dtype, result.shape) != (target.dtype, target.shape):
            return stock(keyset, *args, **kwargs)
        return target.copy_(result)

    return kernel
