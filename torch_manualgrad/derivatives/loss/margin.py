"""soft_margin_loss: $log(1 + exp(-y x))$ for $x$ and $y = 1$ or $-1$, one for each entry, which are then reduced.

With $s$ the sigmoid and $u = y x$, the derivatives for $x$ are $-y s(-u)$ and $y^2 s(u) s(-u)$. PyTorch's derivatives are
quotients of $exp(-u)$, and nan where that overflows: beyond $u = -88$ in single precision.

Args:
    target: $y$, (*).
    reduction: 0, 1 or 2 for none, mean, sum.
    grad: $h$, (*), real.
    grad_output: $g$, (*), or a number for all if they are reduced.
    input: $x$, (*).
"""

from __future__ import annotations

from torch import Tensor

from torch_manualgrad.core.rule import bind, formula, rule

from ..elementwise.saturating import logistic, logistic_slope
from ..elementwise.strong_times import strong_times
from ..terms import fitted_to, sum_over_tangents
from .common import NONE, fitted, reduced, scaled


@formula
def soft_margin_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Cotangent of $x$, given that of $log(1 + exp(-y x))$: $-g y s(-y x)$, with $s$ the sigmoid.

    Args:
        self: $x$, (*), real.

    Returns:
        The shape of ``self``.

    References:
        ATen soft_margin_loss_backward, which has no forward derivative.
    """
    return scaled(grad_output * (-target * logistic(-target * self)), reduction, self)


@formula
def soft_margin_loss_double_backward(grad: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Cotangent of $x$, given the product of those of the gradient and the loss: $h y^2 s(y x) s(-y x)$.

    Returns:
        The shape of ``grad``.
    """
    return scaled(grad * (target * target * logistic_slope(target * input)), reduction, input)


@formula
def soft_margin_loss_double_backward_grad_output(
    grad: Tensor, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """Cotangent of $g$, given $h$, that of the gradient: $-h y s(-y x)$, reduced as the loss.

    Args:
        grad_output: $g$. Only its shape is read.

    Returns:
        The shape of ``grad_output``.
    """
    return fitted(soft_margin_loss_backward(grad, input, target, reduction), grad_output)


def _of_target(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Cotangent of $y$: $-g x s(-y x)$. There are as many losses as entries of $x$, which may be infinite."""
    return scaled(grad * strong_times(logistic(-target * self), -self), reduction, self)


def _target_double(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """The derivative of $-y s(-u)$, $u = y x$, with respect to $y$ is $-s(-u) + u s(u) s(-u)$."""
    u = target * self
    return scaled(grad * strong_times(logistic(-u), strong_times(logistic(u), u) - 1), reduction, self)


# -- the rules --------------------------------------------------------------------------------------------------------

_X = {"self": "self_p", "target": "target_p"}

rule(
    "aten::soft_margin_loss",
    vjp={
        "self": fitted_to("self", soft_margin_loss_backward.bind(grad_output="grad")),
        "target": fitted_to("target", _of_target),
    },
    jvp={
        "result": sum_over_tangents(
            soft_margin_loss_backward.bind(grad_output="self_t", **_X, reduction=NONE),
            bind(_of_target, grad="target_t", **_X, reduction=NONE),
            then=reduced,
        )
    },
    improves=("values", "missing"),
    source="ATen soft_margin_loss_backward",
)
rule(
    "aten::soft_margin_loss_backward",
    vjp={
        "grad_output": soft_margin_loss_double_backward_grad_output.bind(input="self"),
        "self": fitted_to(
            "self",
            lambda grad, grad_output, self, target, reduction: soft_margin_loss_double_backward(
                grad * grad_output, self, target, reduction
            ),
        ),
        "target": fitted_to(
            "target",
            lambda grad, grad_output, self, target, reduction: _target_double(
                grad * grad_output, self, target, reduction
            ),
        ),
    },
    jvp={
        "result": sum_over_tangents(
            soft_margin_loss_backward.bind(grad_output="grad_output_t", **_X),
            lambda self_t, grad_output_p, self_p, target_p, reduction: soft_margin_loss_double_backward(
                grad_output_p * self_t, self_p, target_p, reduction
            ),
            lambda target_t, grad_output_p, self_p, target_p, reduction: _target_double(
                grad_output_p * target_t, self_p, target_p, reduction
            ),
        )
    },
    improves=("values", "missing"),
    source="ATen soft_margin_loss_double_backward",
)
