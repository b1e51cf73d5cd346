"""Which derivative a custom op has, of what is registered for it; and that of its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .autograd import Derivative
from .implementation import Implementation
from .internals import saved_tensors_are_hooked, unwrap_if_dead
from .pair import JvpOnly, Pair
from .schema import tensors_in
from .strong_arithmetic import StrongArithmetic, linear_among

if TYPE_CHECKING:
    from .op import CustomOp

__all__ = ["ActiveRules", "ReferenceDerivative", "active_rules"]


class ActiveRules(NamedTuple):
    """What the autograd kernel goes by: resolved when registrations change, read at every call."""

    derivative: Derivative | None = None
    autograd: Implementation | None = None
    error: str | None = None
    reverse: bool = False


def active_rules(op: CustomOp, current: Mapping[str, Implementation], differentiable: bool) -> ActiveRules:
    """What the autograd kernel goes by.

    Args:
        op: the op.
        current: its active implementations, by their kinds.
        differentiable: whether the reference is, and is differentiated where no derivative is registered.
    """
    get = current.get
    save, backward, jvp = get("save_for_backward"), get("backward"), get("jvp")
    if (whole := get("autograd")) is not None:
        return ActiveRules(autograd=whole)
    if (save is None) != (backward is None):
        found, missing = ("backward", "save_for_backward") if save is None else ("save_for_backward", "backward")
        return ActiveRules(
            error=f"{op.name} has a {found} implementation, written at {current[found].location}, but no "
            f"{missing} implementation. A gradient needs both: register the other with impl_{missing}."
        )
    if save is not None and backward is not None:
        return ActiveRules(Pair(op, save, backward, jvp), reverse=True)
    if differentiable:
        return ActiveRules(ReferenceDerivative(op, op.reference), reverse=True)
    return ActiveRules(JvpOnly(op, jvp)) if jvp is not None else ActiveRules()


class ReferenceDerivative(Derivative):
    """The derivative of the reference implementation itself, for an op whose reference is differentiable.

    Reverse: the reference is differentiated when the backward runs, so the forward costs no more than its kernel.
    Forward, and where the backward will run in the middle of a call (torch.func.vjp cannot): the reference runs in
    place of the op, see `CustomOp.kernel`.
    """

    @property
    def pure(self) -> bool:  # type: ignore[override]
        return not saved_tensors_are_hooked()

    def __init__(self, op: CustomOp, reference: Callable[..., Any]):
        self.reference = reference
        super().__init__(op.op, op.signature)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        constants = [None if isinstance(v, Tensor) else (v,) for v in inputs]
        return [v if isinstance(v, Tensor) else None for v in inputs], (constants, linear_among(inputs))

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        static, linear = static
        if linear:  # what the call computed with strong zeros, it is to have again
            with StrongArithmetic(tensors_in([*grads, *[tensors[i] for i in linear]])):
                return self._vjp(needed, tensors, static, grads)
        return self._vjp(needed, tensors, static, grads)

    def _vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Any:
        places = [i for i, n in enumerate(needed) if n]
        values = [unwrap_if_dead(t) if s is None else s[0] for t, s in zip(tensors, static)]
        if not torch.compiler.is_dynamo_compiling() and saved_tensors_are_hooked():
            return self._plain_vjp(places, values, grads)

        def of_needed(*wanted: Tensor) -> Any:
            full = list(values)
            for i, w in zip(places, wanted):
                full[i] = w
            args, kwargs = self.signature.split(full)
            return self.reference(*args, **kwargs)

        outputs, pullback = torch.func.vjp(of_needed, *[values[i] for i in places])  # type: ignore[misc]
        full = [torch.zeros_like(o) if g is None else g for o, g in zip(self.signature.outputs(outputs), grads)]
        result: list[Any] = [None] * len(values)
        for i, g in zip(places, pullback(full[0] if len(full) == 1 else tuple(full))):
            result[i] = g
        return result

    def _plain_vjp(self, places: Sequence[int], values: list[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """The same in plain autograd: torch.func refuses to run where saved tensors have hooks."""
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            for i in places:  # a node of its own: one tensor may stand for two arguments
                x = values[i]
                values[i] = x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_()
            args, kwargs = self.signature.split(values)
            outputs = self.signature.outputs(self.reference(*args, **kwargs))
            pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None and o.requires_grad]
        wanted = [values[i] for i in places]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=differentiable, allow_unused=True
            )
        result: list[Any] = [None] * len(values)
        for i, x, g in zip(places, wanted, found):
            # a number that is zero, as torch.func.vjp gives: None would make the caller's graph miss its input
            result[i] = torch.zeros_like(x) if g is None else g
        return result
