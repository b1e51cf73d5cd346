"""Binary cross entropy of a probability or a logit $x$ and a target $t$, one loss for each entry, weighted and reduced.

With $g$ the cotangent times the weight, divided by the number $n$ of entries for a mean:

    probability  $-t log x - (1 - t) log(1 - x)$, where a logarithm is at least $-100$,
                 for $x$: $g (x - t) / (x (1 - x))$, for $t$: $g (log(1 - x) - log x)$;
    logit        $-p t log s(x) - (1 - t) log s(-x)$, with $s$ the sigmoid and $p$ the weight of positive targets,
                 for $x$: $g ((1 - t) s(x) - p t s(-x))$, for $t$: $g (log s(-x) - p log s(x))$.

PyTorch's derivative for $x$ has $max(x (1 - x), 1e-12)$ instead of $x (1 - x)$, and so do these rules.

Args:
    grad: $h$, (*).
    target: $t$, (*).
    weight: the weights of the losses, or None.
    reduction: 0, 1 or 2 for none, mean, sum.
    grad_output: cotangent of the loss, (*) or a number.
    pos_weight: $p$, or None for 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torch_manualgrad.core.rule import ByMetadata, bind, formula, rule

from ..elementwise.saturating import logistic
from ..terms import fitted_to, sum_over_tangents
from .common import NONE, of_all, reduced, scaled

aten = torch.ops.aten

_EPS = 1e-12
_LOWEST = -100.0  # the lower bound of logarithms


def _weighted(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _spread(grad: Tensor, input: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """The cotangent of each entry's loss."""
    return scaled(_weighted(grad, weight), reduction, input)


def _log(x: Tensor) -> Tensor:
    return x.log().clamp(min=_LOWEST)


@formula
def binary_cross_entropy_target_backward(
    grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    """Cotangent of $t$, given that of the loss: $g (log(1 - x) - log x)$, each logarithm at least $-100$.

    Args:
        grad: cotangent of the loss, (*) or a number.
        self: $x$, (*), from 0 to 1.

    Returns:
        The shape of ``self``.

    Note:
        Where not differentiable: at $x = 0$ and $x = 1$, and where a logarithm is $-100$. The derivative is 0 there.

    References:
        ATen binary_cross_entropy_target_backward, which is infinite at $x = 0$ and $x = 1$.
    """
    # PyTorch's derivative of a clamped logarithm at 0 is 0 times infinity
    inside = (self > 0) & (self < 1)
    x = torch.where(inside, self, 0.5)
    slope = torch.where(inside, _log(1 - x) - _log(x), torch.where(self < 0.5, -_LOWEST, _LOWEST).to(self.dtype))
    return _spread(grad, self, weight, reduction) * slope


@formula
def binary_cross_entropy_double_backward(
    grad_output: Tensor, grad: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    """Cotangent of $x$, given $h$, that of its gradient: $h g (t / x^2 + (1 - t) / (1 - x)^2)$.

    Args:
        input: $x$, (*), from 0 to 1; $x$ and $1 - x$ count as $1e-12$ if they are smaller.

    Returns:
        The shape of ``input``.

    References:
        ATen binary_cross_entropy_double_backward, which is 0 at $x = t = 0$.
    """
    x, rest = input.clamp(min=_EPS), (1 - input).clamp(min=_EPS)
    return _spread(grad_output * grad, input, weight, reduction) * (target / (x * x) + (1 - target) / (rest * rest))


@formula
def binary_cross_entropy_double_backward_target(
    grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    """Cotangent of $t$, given $h$, that of the gradient of $x$: $-h g / (x (1 - x))$.

    Args:
        self: $x$, (*), from 0 to 1; $x (1 - x)$ counts as $1e-12$ if it is smaller.

    Returns:
        The shape of ``self``.
    """
    return -_spread(grad * grad_output, self, weight, reduction) / (self * (1 - self)).clamp(min=_EPS)


@formula
def binary_cross_entropy_double_backward_grad_output(
    grad: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Tensor:
    """Cotangent of the loss's cotangent, given $h$, that of the gradient of $x$: $h (x - t) / (x (1 - x))$, reduced.

    Args:
        input: $x$, (*), from 0 to 1.

    Returns:
        The shape of the loss.
    """
    return reduced(aten.binary_cross_entropy_backward(grad, input, target, weight, NONE), reduction)


@formula
def binary_cross_entropy_with_logits_backward(
    grad: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Tensor:
    """Cotangent of the logit $x$, given that of the loss: $g ((1 - t) s(x) - p t s(-x))$.

    Args:
        grad: cotangent of the loss, (*) or a number.
        input: $x$, (*), real.

    Returns:
        The shape of ``input``.
    """
    slope = (1 - target) * logistic(input) - _weighted(target, pos_weight) * logistic(-input)
    return _spread(grad, input, weight, reduction) * slope


@formula
def binary_cross_entropy_with_logits_target_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Tensor:
    """Cotangent of $t$, given that of the loss of the logit $x$: $g (log s(-x) - p log s(x))$; for $p = 1$, $-g x$.

    Args:
        self: $x$, (*), real.

    Returns:
        The shape of ``target``.
    """
    slope = -self if pos_weight is None else logsigmoid(-self) - pos_weight * logsigmoid(self)
    return _spread(grad_output, self, weight, reduction) * slope


# -- the rules --------------------------------------------------------------------------------------------------------


def _self_vjp(grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    grad, reduction = of_all(grad, self, reduction)
    return aten.binary_cross_entropy_backward(grad, self, target, weight, reduction)


def _weight_vjp(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    return scaled(grad, reduction, self) * aten.binary_cross_entropy(self, target, None, NONE)


def _backward_weight_vjp(grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    return grad * _self_vjp(grad_output, self, target, None, reduction)


def _logits_weight_vjp(grad: Tensor, self: Tensor, target: Tensor, pos_weight: Tensor | None, reduction: int) -> Tensor:
    losses = aten.binary_cross_entropy_with_logits(self, target, None, pos_weight, NONE)
    return scaled(grad, reduction, self) * losses


def _pos_weight_vjp(grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    return -_spread(grad, self, weight, reduction) * target * logsigmoid(self)


def _weights_are_constant(
    self: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> bool:
    return not any(w is not None and w.requires_grad for w in (weight, pos_weight))


_AT = {"self": "self_p", "target": "target_p", "weight": "weight_p"}

rule(
    "aten::binary_cross_entropy",
    vjp={
        "self": _self_vjp,
        "target": fitted_to("target", binary_cross_entropy_target_backward),
        "weight": fitted_to("weight", _weight_vjp),
    },
    jvp={
        "result": sum_over_tangents(
            bind(aten.binary_cross_entropy_backward.default, grad_output="self_t", **_AT, reduction=NONE),
            binary_cross_entropy_target_backward.bind(grad="target_t", **_AT, reduction=NONE),
            lambda weight_t, self_p, target_p: aten.binary_cross_entropy(self_p, target_p, None, NONE) * weight_t,
            then=reduced,
        )
    },
    improves=("values", "missing"),
    source="ATen binary_cross_entropy_backward, binary_cross_entropy_target_backward; the gradient of the weights is new",
)
rule(
    "aten::binary_cross_entropy_backward",
    vjp={
        "grad_output": fitted_to("grad_output", binary_cross_entropy_double_backward_grad_output.bind(input="self")),
        "self": binary_cross_entropy_double_backward.bind(input="self"),
        "target": fitted_to("target", binary_cross_entropy_double_backward_target),
        "weight": fitted_to("weight", _backward_weight_vjp),
    },
    jvp={
        "result": sum_over_tangents(
            bind(_self_vjp, grad="grad_output_t", **_AT),
            binary_cross_entropy_double_backward.bind(
                grad_output="grad_output_p", grad="self_t", input="self_p", target="target_p", weight="weight_p"
            ),
            binary_cross_entropy_double_backward_target.bind(grad="target_t", grad_output="grad_output_p", **_AT),
            lambda weight_t, grad_output_p, self_p, target_p, reduction: (
                _self_vjp(grad_output_p, self_p, target_p, None, reduction) * weight_t
            ),
        )
    },
    improves=("values", "missing"),
    source="ATen binary_cross_entropy_double_backward",
)
_AT_LOGIT = {"target": "target_p", "weight": "weight_p", "pos_weight": "pos_weight_p", "reduction": NONE}
rule(
    "aten::binary_cross_entropy_with_logits",
    vjp={
        "self": fitted_to("self", binary_cross_entropy_with_logits_backward.bind(input="self")),
        "target": fitted_to("target", binary_cross_entropy_with_logits_target_backward.bind(grad_output="grad")),
        "weight": fitted_to("weight", _logits_weight_vjp),
        "pos_weight": fitted_to("pos_weight", _pos_weight_vjp),
    },
    jvp={
        "result": sum_over_tangents(
            binary_cross_entropy_with_logits_backward.bind(grad="self_t", input="self_p", **_AT_LOGIT),
            binary_cross_entropy_with_logits_target_backward.bind(grad_output="target_t", self="self_p", **_AT_LOGIT),
            lambda weight_t, self_p, target_p, pos_weight_p: (
                aten.binary_cross_entropy_with_logits(self_p, target_p, None, pos_weight_p, NONE) * weight_t
            ),
            lambda pos_weight_t, self_p, target_p, weight_p: (
                -_weighted(target_p * logsigmoid(self_p), weight_p) * pos_weight_t
            ),
            then=reduced,
        )
    },
    improves=("values", "missing"),  # in forward mode the weights are constants to PyTorch, in reverse mode it raises
    defer_to_stock=ByMetadata(_weights_are_constant),
    source="ATen binary_cross_entropy_with_logits_backward, binary_cross_entropy_with_logits_target_backward",
)
