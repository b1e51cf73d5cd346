"""The fast path of a call when nothing but autograd is active: no transform, no dual level, no tracer, no autocast.

An operator that works in every mode passes through machinery that such a call does not need, and on a small batch most
of the time is spent there. The mathematics is the same formula; autograd tracks one autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.engine.node import level_function
from ..core.internals import PLAIN, below_autograd, is_autocast_enabled, only_autograd

__all__ = ["fast_path", "is_plain_call"]

Gradients = Sequence[Tensor | None]


def is_plain_call(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors may take the fast path."""
    if torch.compiler.is_compiling() or is_autocast_enabled() or not only_autograd():
        return False
    return all(t is None or type(t) in PLAIN for t in tensors)


def fast_path(
    name: str,
    count: int,
    forward: Callable[..., tuple[Tensor, Sequence[Tensor | None]]],
    backward: Callable[..., Gradients],
    again: Callable[..., Gradients] | None = None,
) -> Callable[..., Tensor]:
    """Make a function of tensors and constants with its own derivative, for calls that are plain (`is_plain_call`).

    Args:
        name: of the node in the graph.
        count: the number of leading arguments that are tensors (or None).
        forward: ``(*arguments) -> (result, residuals)``, run below autograd.
        backward: ``(needed, grad, residuals, *constants) -> gradients`` of the tensors, run below autograd.
        again: the same in operations that are differentiable in every mode, for a backward that is itself differentiated
            or transformed; None to use ``backward``.

    Returns:
        The function.
    """
    differentiable = again or backward

    def run(ctx: Any, *arguments: Any) -> Tensor:
        with below_autograd():
            result, residuals = forward(*arguments)
        ctx.save_for_backward(*residuals)
        ctx.constants = arguments[count:]
        return result

    def pull_back(ctx: Any, grad: Tensor) -> Any:
        needed, residuals, constants = ctx.needs_input_grad[:count], ctx.saved_tensors, ctx.constants
        if torch.is_grad_enabled() or is_autocast_enabled() or not only_autograd():
            found = differentiable(needed, grad, residuals, *constants)
        else:
            with below_autograd():
                found = backward(needed, grad, residuals, *constants)
        return (*found, *[None] * len(constants))

    made = level_function("".join(word.capitalize() for word in name.split("_")), forward=run, backward=pull_back)
    apply: Callable[..., Tensor] = made.apply
    return apply
