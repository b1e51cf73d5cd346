"""Hinge losses over classes: multi_margin_loss and multilabel_margin_loss.

The loss of a row of $x$ is a sum over pairs of classes $(j, k)$ of $w phi(m - x_k + x_j) / C$, with
$phi(z) = max(z, 0)^p$: over all $j != k = y$ for the first, and over all labels $k$ and all other classes $j$ for the
second. For one row, with $z$ the arguments,

    backward         $g sum w phi'(z) (e_j - e_k) / C$,
    double backward  $g sum w phi''(z) (h_j - h_k) (e_j - e_k) / C$, given $h$, the cotangent of that.

For $p = 1$, and with labels, $phi''$ is zero.

Args:
    grad_output: $g$, (N,), or a number if the losses are reduced.
    self: $x$, (N, C) or (C,), real.
    target: $y$, (N,) or (): the class of each row.
    p: 1 or 2.
    margin: $m$.
    weight: $w$ of each class, (C,), or None for 1.
    reduction: 0, 1 or 2 for none, mean, sum.

Note:
    Where not differentiable: where $z = 0$ in $max(z, 0)^p$. Its first and second derivatives are 0 there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import bind, formula, rule

from ..terms import sum_over_tangents
from .common import NONE, of_all, reduced, scaled

aten = torch.ops.aten


def _less(x: Tensor, target: Tensor) -> Tensor:
    """$x_j - x_y$ for each row."""
    return x - x.gather(1, target)


def _less_transposed(x: Tensor, target: Tensor) -> Tensor:
    """$sum x_j (e_j - e_y)$ for each row."""
    return x.scatter_add(1, target, -x.sum(1, keepdim=True))


def _rows(self: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """One row for each loss: $x$, (N, C), and $y$, (N, 1)."""
    return self.reshape(-1, self.shape[-1] if self.dim() else 1), target.reshape(-1, 1)


def _weights(x: Tensor, y: Tensor, margin: Number, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """$z$, and $w / C$, where $z$ is positive and $j$ is not $y$, else 0: the operator ignores other $z$, infinite or nan."""
    z = margin + _less(x, y)
    counted = (z > 0) & (torch.arange(x.shape[1], device=x.device) != y)
    z = torch.where(counted, z, 0)
    factor = counted.to(x.dtype) / x.shape[1]
    return z, factor if weight is None else factor * weight[y]


def _slopes(x: Tensor, y: Tensor, p: Number, margin: Number, weight: Tensor | None) -> Tensor:
    """$w phi'(z) / C$."""
    z, factor = _weights(x, y, margin, weight)
    return factor if p == 1 else 2 * z * factor


@formula(kernel=("default",))
def multi_margin_loss_gradient(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    p: Number,
    margin: Number,
    weight: Tensor | None,
    reduction: int,
) -> Tensor:
    """Cotangent of $x$, given that of multi_margin_loss: $g w$ sum over $j$ of $phi'(m - x_y + x_j) (e_j - e_y) / C$.

    Returns:
        The shape of ``self``.

    References:
        ATen multi_margin_loss_backward, which has no derivative.
    """
    x, y = _rows(self, target)
    found = _less_transposed(grad_output.reshape(-1, 1) * _slopes(x, y, p, margin, weight), y)
    return scaled(found, reduction, y).reshape(self.shape)


@multi_margin_loss_gradient.impl("default")
def _(*given: Any) -> Tensor:
    return aten.multi_margin_loss_backward(*given)


@formula
def multi_margin_loss_jvp(
    self_p: Tensor,
    self_t: Tensor,
    target: Tensor,
    p: Number,
    margin: Number,
    weight: Tensor | None,
    reduction: int,
) -> Tensor:
    """Tangent of multi_margin_loss: $w$ sum over $j$ of $phi'(m - x_y + x_j) (t_j - t_y) / C$, reduced as the loss.

    Args:
        self_p: $x$, (N, C) or (C,), real.
        self_t: $t$, the shape of $x$.

    Returns:
        The shape of the loss.

    References:
        The transpose of ATen multi_margin_loss_backward.
    """
    x, y = _rows(self_p, target)
    found = (_slopes(x, y, p, margin, weight) * _less(self_t.reshape(x.shape), y)).sum(1)
    return reduced(found.reshape(target.shape), reduction)


@formula
def multi_margin_loss_double_backward(
    grad: Tensor,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    p: Number,
    margin: Number,
    weight: Tensor | None,
    reduction: int,
) -> Tensor:
    """Cotangent of $x$, given $h$, that of its gradient; or tangent of the gradient, given $h$, that of $x$. Zero for $p = 1$.

    Args:
        grad: $h$, the shape of ``self``.

    Returns:
        The shape of ``self``.

    References:
        The derivative of ATen multi_margin_loss_backward.
    """
    if p == 1:
        return torch.zeros_like(self)
    x, y = _rows(self, target)
    _, factor = _weights(x, y, margin, weight)
    found = _less_transposed(2 * grad_output.reshape(-1, 1) * factor * _less(grad.reshape(x.shape), y), y)
    return scaled(found, reduction, y).reshape(self.shape)


@formula(kernel=("default",))
def multilabel_margin_loss_gradient(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    """Cotangent of $x$, given that of multilabel_margin_loss: $g sum (e_j - e_k) / C$ over pairs with $x_k < 1 + x_j$.

    Args:
        target: the labels $k$ of each row up to the first $-1$, the shape of ``self``.
        is_target: whether a class is a label, as multilabel_margin_loss_forward returns it.

    Returns:
        The shape of ``self``.

    References:
        ATen multilabel_margin_loss_backward, which has no derivative.
    """
    x = self.reshape(-1, self.shape[-1] if self.dim() else 1)
    given = target.reshape(x.shape)
    labels = given.clamp(min=0)
    valid = (given >= 0).cumprod(1).to(x.dtype)
    z = 1 - x.gather(1, labels)[:, :, None] + x[:, None]
    pairs = (z > 0).to(x.dtype) * valid[:, :, None] * (1 - is_target.reshape(x.shape))[:, None]
    slope = pairs.sum(1).scatter_add(1, labels, -pairs.sum(2)) / x.shape[1]
    return scaled(grad_output.reshape(-1, 1) * slope, reduction, x[:, 0]).reshape(self.shape)


@multilabel_margin_loss_gradient.impl("default")
def _(*given: Any) -> Tensor:
    return aten.multilabel_margin_loss_backward(*given)


def _multilabel_jvp(self_p: Tensor, self_t: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Tensor:
    ones = torch.ones(self_p.shape[:-1], dtype=self_p.dtype, device=self_p.device)
    slope = multilabel_margin_loss_gradient(ones, self_p, target, NONE, is_target)
    return reduced((slope * self_t).sum(-1), reduction)


def _vjp(
    grad: Tensor, self: Tensor, target: Tensor, p: Number, margin: Number, weight: Tensor | None, reduction: int
) -> Tensor:
    grad, reduction = of_all(grad, target, reduction)
    return multi_margin_loss_gradient(grad, self, target, p, margin, weight, reduction)


def _of_classes(rows: Tensor, target: Tensor, weight: Tensor, reduction: int) -> Tensor:
    """The sum over the rows of each class, in the shape of the weights."""
    return torch.zeros_like(weight).index_add(0, target.reshape(-1), scaled(rows, reduction, rows))


def _weight_vjp(
    grad: Tensor, self: Tensor, target: Tensor, p: Number, margin: Number, weight: Tensor, reduction: int
) -> Tensor:
    x, y = _rows(self, target)
    z, factor = _weights(x, y, margin, None)
    return _of_classes(grad.reshape(-1) * (factor * z**p).sum(1), target, weight, reduction)


def _weight_backward_vjp(
    grad: Tensor,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    p: Number,
    margin: Number,
    weight: Tensor,
    reduction: int,
) -> Tensor:
    x, y = _rows(self, target)
    slopes = (_slopes(x, y, p, margin, None) * _less(grad.reshape(x.shape), y)).sum(1)
    return _of_classes(grad_output.reshape(-1) * slopes, target, weight, reduction)


def _multilabel_vjp(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Tensor:
    losses = self[..., :1] if self.dim() else self
    grad_output, reduction = of_all(grad_output, losses, reduction)
    return multilabel_margin_loss_gradient(grad_output, self, target, reduction, is_target)


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::multi_margin_loss",
    vjp={"self": _vjp, "weight": _weight_vjp},
    jvp={
        "result": sum_over_tangents(
            multi_margin_loss_jvp.bind(weight="weight_p"),
            bind(aten.multi_margin_loss.default, self="self_p", weight="weight_t"),  # linear in the weights
        )
    },
    improves="missing",
    source="ATen multi_margin_loss_backward; its derivatives are new",
)
rule(
    "aten::multi_margin_loss_backward",
    vjp={
        "grad_output": multi_margin_loss_jvp.bind(self_p="self", self_t="grad"),
        "self": multi_margin_loss_double_backward,
        "weight": _weight_backward_vjp,
    },
    jvp={
        "result": sum_over_tangents(
            multi_margin_loss_gradient.bind(grad_output="grad_output_t", self="self_p", weight="weight_p"),
            multi_margin_loss_double_backward.bind(
                grad="self_t", grad_output="grad_output_p", self="self_p", weight="weight_p"
            ),
            multi_margin_loss_gradient.bind(grad_output="grad_output_p", self="self_p", weight="weight_t"),
        )
    },
    improves="missing",
    source="the derivative of ATen multi_margin_loss_backward",
)
rule(
    "aten::multilabel_margin_loss_forward",
    vjp={"self": _multilabel_vjp},
    jvp={"output": _multilabel_jvp},
    not_differentiable="is_target",
    improves="missing",
    source="ATen multilabel_margin_loss_backward; its derivatives are new",
)
rule(
    "aten::multilabel_margin_loss_backward",
    vjp={
        "grad_output": bind(_multilabel_jvp, self_p="self", self_t="grad"),
        ("self", "is_target"): lambda: (None, None),
    },
    jvp={"result": multilabel_margin_loss_gradient.bind(grad_output="grad_output_t", self="self_p")},
    improves="missing",
    source="the derivative of ATen multilabel_margin_loss_backward",
)
