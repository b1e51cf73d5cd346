"""The derivative of a rule under ``override(strong_zero=True)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bound import Bound
from .internals import is_finite, values_readable
from .schema import is_differentiable, tensors_in
from .strong_arithmetic import StrongArithmetic

if TYPE_CHECKING:
    from .rule import Rule

__all__ = ["StrongBound"]


class StrongBound(Bound):
    """The derivative in which a cotangent or tangent of 0 gives 0.

    A formula that has a variant with strong zeros, its attribute ``strong``, is replaced by it. If all have, that is all.
    Others run as they are, and once more with `StrongArithmetic` if something that is not finite has come out: 0 times a
    finite number needs no care. Where values cannot be read, they run with it at once.
    """

    strong_zero = True

    def __init__(self, rule: Rule) -> None:
        self.bare = all(hasattr(f, "strong") for f in (*rule.vjp.values(), *rule.jvp.values()))
        super().__init__(rule, None)
        # what a backward operator is linear in is a cotangent, too
        self._cotangents = [i for i, name in enumerate(self.signature.names) if name.startswith("grad")]
        self._saved_cotangents = [i for i, name in enumerate(self.saved) if name.startswith("grad")]

    def meant(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return getattr(function, "strong", function)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        vjp = super().vjp
        if self.bare or torch.compiler.is_dynamo_compiling():
            return vjp(needed, tensors, static, grads)
        linear = [*grads, *[tensors[i] for i in self._saved_cotangents if i < len(tensors)]]
        return _strong(lambda: vjp(needed, tensors, static, grads), linear)

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        jvp = super().jvp
        if self.bare or torch.compiler.is_dynamo_compiling():
            return jvp(inputs, outputs, tangents)
        linear = [*tangents, *[inputs[i] for i in self._cotangents]]
        return _strong(lambda: jvp(inputs, outputs, tangents), linear)


def _strong(derivative: Callable[[], Sequence[Any]], linear: Iterable[Any]) -> Sequence[Any]:
    factors = [x for x in tensors_in(linear) if is_differentiable(x)]
    if all(map(values_readable, factors)):
        found = derivative()
        if all(is_finite(x) for x in tensors_in(found)):
            return found
    with StrongArithmetic(factors):
        return derivative()
