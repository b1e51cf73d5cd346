"""The derivative of an operator of `torch.library.custom_op`, from what its ``register_autograd`` was given.

PyTorch's own kernel for it knows neither tangents nor torch.func. This one runs ``setup_context`` anew, from the inputs and
outputs, for each derivative: what it computes has a history in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import Derivative
from .internals import unwrap_if_dead
from .schema import Signature, flatten, unflatten

__all__ = ["LibraryDerivative"]


class _Context:
    """What setup_context and backward are given."""

    def __init__(self, needs_input_grad: tuple[Any, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Nothing to do: a backward takes no notice of them."""


class LibraryDerivative(Derivative):
    """The vjp that setup_context and backward make; the jvp by transposition."""

    pure = False

    def __init__(self, op: Any, setup_context: Callable[..., Any] | None, backward: Callable[..., Any]) -> None:
        self._setup_context, self._backward = setup_context, backward
        super().__init__(op, Signature(op._schema))
        self._places = (self.signature.lists, [len(self.signature.names) + i for i in self.signature.output_lists])

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        leaves, lengths = flatten((*inputs, *outputs), [*self._places[0], *self._places[1]])
        constants = [None if isinstance(v, Tensor) else (v,) for v in leaves]
        return [v if isinstance(v, Tensor) else None for v in leaves], (constants, lengths)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        constants, lengths = static
        values = unflatten([unwrap_if_dead(t) if c is None else c[0] for t, c in zip(tensors, constants)], lengths)
        count = len(self.signature.names)
        args, keywords = self.signature.split(values[:count])
        outputs = values[count:]
        context = _Context(tuple(needed[: len(args)]))
        if self._setup_context is not None:
            given: dict[str, Any] = {"keyword_only_inputs": keywords} if keywords else {}
            output = tuple(outputs) if len(outputs) != 1 else outputs[0]
            self._setup_context(ctx=context, inputs=tuple(args), output=output, **given)
        if context.materialize_grads:
            grads = [_full(g, o) for g, o in zip(grads, outputs)]
        found = self._backward(context, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return [*found, *[None] * (count - len(found))]


def _full(grad: Any, output: Any) -> Any:
    if isinstance(output, (list, tuple)):
        return [_full(g, o) for g, o in zip(grad or [None] * len(output), output)]
    return torch.zeros_like(output) if grad is None and isinstance(output, Tensor) else grad
