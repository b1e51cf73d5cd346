"""soft_margin_loss: log(1 + exp(-y x)) for x and y = 1 or -1, one for each entry, which are then reduced.

With s the sigmoid and u = y x the derivatives for x are -y s(-u) and y^2 s(u) s(-u). PyTorch's are quotients of
exp(-u), nan where that overflows: beyond u = -88 in single precision.

Args:
    target: y, (*).
    reduction: 0, 1 or 2 for none, mean, sum.
    grad: h, (*), real.
    grad_output: g, (*), or a number for all if they are reduced.
    input: x, (*).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from ..elementwise.saturating import logistic, logistic_slope
from .common import NONE, fitted, reduced, scaled


@formula
def soft_margin_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Cotangent of x, given that of log(1 + exp(-y x)): -g y s(-y x), with s the sigmoid.

    Args:
        self: x, (*), real.

    Returns:
        The shape of ``self``.

    References:
        ATen soft_margin_loss_backward, which has no forward derivative.
    """
    return scaled(grad_output * (-target * logistic(-target * self)), reduction, self)


@formula
def soft_margin_loss_double_backward(grad: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Cotangent of x, given the product of that of the gradient and of that of the loss: h y^2 s(y x) s(-y x).

    Returns:
        The shape of ``grad``.
    """
    return scaled(grad * (target * target * logistic_slope(target * input)), reduction, input)


@formula
def soft_margin_loss_double_backward_grad_output(
    grad: Tensor, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """Cotangent of g, given h, that of the gradient: -h y s(-y x), reduced as the loss.

    Args:
        grad_output: g. Only its shape is read.

    Returns:
        The shape of ``grad_output``.
    """
    return fitted(soft_margin_loss_backward(grad, input, target, reduction), grad_output)


def _jvp(self_p: Tensor, self_t: Tensor | None, target_p: Tensor, target_t: Tensor | None, reduction: int) -> Tensor:
    """The loss is symmetric in x and y."""
    found = torch.zeros_like(self_p)
    if self_t is not None:
        found = found + soft_margin_loss_backward(self_t, self_p, target_p, NONE)
    if target_t is not None:
        found = found + soft_margin_loss_backward(target_t, target_p, self_p, NONE)
    return reduced(found, reduction)


def _backward_jvp(
    grad_output_p: Tensor,
    grad_output_t: Tensor | None,
    self_p: Tensor,
    self_t: Tensor | None,
    target_p: Tensor,
    target_t: Tensor | None,
    reduction: int,
) -> Tensor:
    """The derivative of -y s(-u), u = y x, with respect to y is -s(-u) + u s(u) s(-u)."""
    found = torch.zeros_like(self_p)
    if grad_output_t is not None:
        found = found + soft_margin_loss_backward(grad_output_t, self_p, target_p, reduction)
    if self_t is not None:
        found = found + soft_margin_loss_double_backward(grad_output_p * self_t, self_p, target_p, reduction)
    if target_t is not None:
        u = target_p * self_p
        slope = (-u).sigmoid() * (u * u.sigmoid() - 1)
        found = found + scaled(grad_output_p * target_t * slope, reduction, self_p)
    return found


rule(
    "aten::soft_margin_loss",
    vjp={
        "self": lambda grad, self, target, reduction: fitted(
            soft_margin_loss_backward(grad, self, target, reduction), self
        )
    },
    jvp={"result": _jvp},
    improves=("values", "missing"),
    source="ATen soft_margin_loss_backward",
)
rule(
    "aten::soft_margin_loss_backward",
    vjp={
        "grad_output": soft_margin_loss_double_backward_grad_output.bind(input="self"),
        "self": lambda grad, grad_output, self, target, reduction: fitted(
            soft_margin_loss_double_backward(grad * grad_output, self, target, reduction), self
        ),
    },
    jvp={"result": _backward_jvp},
    improves=("values", "missing"),
    source="ATen soft_margin_loss_double_backward",
)
