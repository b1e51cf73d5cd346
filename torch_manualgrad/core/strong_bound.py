"""The derivative of a rule under ``override(strong_zero=True)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bound import Bound
from .internals import are_finite, at_next_level, values_readable
from .schema import is_differentiable, tensors_in
from .strong_arithmetic import StrongArithmetic
from .transpose import transposing

if TYPE_CHECKING:
    from .rule import Rule

__all__ = ["StrongBound"]


class StrongBound(Bound):
    """The derivative in which a cotangent or tangent of 0 gives 0.

    A formula that has a variant with strong zeros, its attribute ``strong``, is replaced by it. If all have, that is all.
    Others run as they are, and once more with `StrongArithmetic` if something that is not finite has come out: 0 times a
    finite number needs no care. Where values cannot be read, they run with it at once.

    Of a plain call on the CPU that is left to PyTorch where zeros are not strong, PyTorch's own gradients come before these,
    and are it if they are finite: csrc/calls/stock.h.
    """

    strong_zero = True

    def __init__(self, rule: Rule) -> None:
        self.bare = all(hasattr(f, "strong") for f in (*rule.vjp.values(), *rule.jvp.values()))
        super().__init__(rule, None)
        # what a backward operator is linear in is a cotangent, too
        self._cotangents = [i for i, name in enumerate(self.signature.names) if name.startswith("grad")]
        kept = [] if self._lists else self.tensor_places
        self._saved_cotangents = [i for i, place in enumerate(kept) if place in self._cotangents]

    def meant(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return getattr(function, "strong", function)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        vjp = super().vjp
        if self.bare or torch.compiler.is_dynamo_compiling() or transposing():
            return vjp(needed, tensors, static, grads)
        linear = _factors([*grads, *[tensors[i] for i in self._saved_cotangents]])
        if values_readable(linear):
            found = vjp(needed, tensors, static, grads)
            if are_finite(tensors_in(found)):
                return found
        with StrongArithmetic(linear):
            return vjp(needed, tensors, static, grads)

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        jvp = super().jvp
        if self.bare or torch.compiler.is_dynamo_compiling():
            return jvp(inputs, outputs, tangents)
        if values_readable(_factors(tangents)):
            found = jvp(inputs, outputs, tangents)
            if are_finite(tensors_in(found)):
                return found

        def strong(inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
            with StrongArithmetic(_factors([*tangents, *[inputs[i] for i in self._cotangents]])):
                return jvp(inputs, outputs, tangents)

        return at_next_level(strong, inputs, outputs, tangents)


def _factors(values: Sequence[Any]) -> list[Tensor]:
    return [x for x in tensors_in(values) if is_differentiable(x)]
