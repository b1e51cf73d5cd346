"""The program that keeps only its inputs, and is recomputed by its derivatives.

A derivative is a program of the same kind: a vjp is a function of the inputs and the cotangents, which keeps only these
when it is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.captures import is_differentiated
from ..core.internals import only_autograd, transforms_in_dual_level
from ..custom_rules.trees import distinct
from ..programs.functions import Values, matching, placed
from ..programs.operator import Program, call, is_smooth

__all__ = ["Recomputed"]

Function = Callable[[Sequence[Any]], Sequence[Tensor]]


class Recomputed(Program):
    """A function of tensors that its derivatives recompute.

    Args:
        function: of a sequence of tensors.
    """

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self._outputs = 0

    @property
    def outputs(self) -> int:
        return self._outputs

    def run(self, tensors: Values) -> list[Tensor]:
        results = self.function(tensors)
        self._outputs = len(results)
        return distinct(results, tensors)

    def needed(self, count: int, inputs: int) -> tuple[Sequence[int], Sequence[int]]:
        return range(self.outputs, count), range(inputs)

    def again(self, values: Sequence[Any], kept: Values) -> Sequence[Tensor]:
        """The recomputed results of the function.

        Args:
            values: its arguments.
            kept: the values that `run` returned after the results; empty if they must not be used.
        """
        return self.function(values)

    def vjp(
        self, xs: Sequence[Any], tensors: Sequence[Any], places: Sequence[int], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        n, m = self.outputs, len(tensors)
        received = [i for i, g in enumerate(grads[:n]) if g is not None and is_smooth(xs[i])]
        given = [g for i in received if (g := grads[i]) is not None]
        if not given:
            return [None] * len(places)
        if not any(map(is_differentiated, (*tensors, *given))):
            return self._pulled(tensors, places, received, given, xs[n:])

        def pulled(values: Sequence[Any]) -> Sequence[Tensor]:
            found = self._pulled(values[:m], places, received, values[m:], [])
            return [torch.zeros_like(values[i]) if g is None else g for i, g in zip(places, found)]

        return call(Recomputed(pulled), [*tensors, *given])

    def jvp(
        self, xs: Values, tensors: Values, places: Sequence[int], tangents: Values, keeps: bool
    ) -> Sequence[Tensor | None]:
        n, m = self.outputs, len(tensors)
        smooth = [i for i in range(n) if is_smooth(xs[i])]

        def pushed(values: Sequence[Any]) -> Sequence[Tensor]:
            def function(*changed: Tensor) -> tuple[Tensor, ...]:
                found = self.again(placed(values[:m], places, changed), [])
                return tuple(found[i] for i in smooth)

            primals = tuple(values[i] for i in places)
            with transforms_in_dual_level():
                pair: Any = torch.func.jvp(function, primals, tuple(matching(values[m:], primals)))
            found: Sequence[Tensor] = pair[1]
            return found

        if not smooth:
            return [None] * n
        values = [*tensors, *tangents]
        differentiated = any(map(is_differentiated, values))
        return placed([None] * n, smooth, call(Recomputed(pushed), values) if differentiated else pushed(values))

    def _pulled(
        self, values: Sequence[Any], places: Sequence[int], received: Sequence[int], given: Values, kept: Values
    ) -> Sequence[Tensor | None]:
        """The cotangents of the values at ``places``; None if a result does not depend on them."""

        def function(*changed: Tensor) -> tuple[Tensor, ...]:
            found = self.again(placed(values, places, changed), kept)
            return tuple(found[i] for i in received)

        primals = [values[i] for i in places]
        if not only_autograd():
            pair: Any = torch.func.vjp(function, *primals)
            found: Sequence[Tensor | None] = pair[1](tuple(matching(given, pair[0])))
            return found
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [x.view_as(x) if create and x.requires_grad else x.detach().requires_grad_() for x in primals]
            results = function(*leaves)
        pairs = [(r, g) for r, g in zip(results, matching(given, results)) if r.requires_grad]
        if not pairs:
            return [None] * len(places)
        return torch.autograd.grad(
            [r for r, _ in pairs], leaves, [g for _, g in pairs], create_graph=create, allow_unused=True
        )
