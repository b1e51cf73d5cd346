"""The short way of a call near which there is nothing but autograd: no transform, no dual level, no tracer, no autocast.

An operator that holds in every mode makes detours which such a call does not need, and on a small batch they are most of
its time. The mathematics is the same formula; what is recorded is one autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import PLAIN, SingleLevelFunction, below_autograd, is_autocast_enabled, only_autograd

__all__ = ["alone", "shortened"]

Gradients = Sequence[Tensor | None]


def alone(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors may take the short way."""
    if torch.compiler.is_compiling() or is_autocast_enabled() or not only_autograd():
        return False
    return all(t is None or type(t) in PLAIN for t in tensors)


def shortened(
    name: str,
    count: int,
    forward: Callable[..., tuple[Tensor, Sequence[Tensor | None]]],
    backward: Callable[..., Gradients],
    again: Callable[..., Gradients] | None = None,
) -> Callable[..., Tensor]:
    """A function of tensors and constants with its own derivative, for calls that are `alone`.

    Args:
        name: of the node in the graph.
        count: how many of the arguments, the first ones, are tensors (or None).
        forward: ``(*arguments) -> (result, residuals)``, run below autograd.
        backward: ``(needed, grad, residuals, *constants) -> gradients`` of the tensors, run below autograd.
        again: the same, in operations that are differentiable in every mode, for whom the backward is differentiated or
            transformed; by default `backward`.
    """
    differentiable = again or backward

    class Short(SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            with below_autograd():
                result, residuals = forward(*arguments)
            ctx.save_for_backward(*residuals)
            ctx.constants = arguments[count:]
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            needed, residuals, constants = ctx.needs_input_grad[:count], ctx.saved_tensors, ctx.constants
            if torch.is_grad_enabled() or is_autocast_enabled() or not only_autograd():
                found = differentiable(needed, grad, residuals, *constants)
            else:
                with below_autograd():
                    found = backward(needed, grad, residuals, *constants)
            return (*found, *[None] * len(constants))

    Short.__name__ = "".join(word.capitalize() for word in name.split("_"))
    return Short.apply  # type: ignore[attr-defined]
