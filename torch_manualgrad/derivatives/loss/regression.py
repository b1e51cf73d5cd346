"""Losses of d = x - y, one for each entry, which are then reduced: mse_loss, smooth_l1_loss and huber_loss.

With f the loss of one entry, g the cotangent, and n the number of entries where the mean is taken, else 1:

    backward         g f'(d) / n for x, its negative for y,
    double backward  h g f''(d) / n for x, given h, the cotangent of that for x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.binding import bound_to
from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule

from .common import MEAN, NONE, SUM, fitted, paired, random, reduced, scaled

aten = torch.ops.aten


@formula
def mse_loss_double_backward(grad: Tensor, input: Tensor, reduction: int) -> Tensor:
    """Cotangent of x, given the product of that of the gradient and of that of the loss (x - y)^2: 2 h / n.

    Args:
        grad: h, (*), real.
        input: x, of which the entries are counted.
        reduction: 0, 1 or 2 for none, mean, sum.

    Returns:
        The shape of ``grad``.

    References:
        ATen mse_loss_double_backward.
    """
    return scaled(2 * grad, reduction, input)


@formula
def smooth_l1_loss_double_backward(grad: Tensor, input: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Cotangent of x, given the product of that of the gradient and of that of the loss: h / (b n) where |x - y| < b.

    Args:
        grad: h, (*), real.
        input: x, (*).
        target: y, (*).
        reduction: 0, 1 or 2 for none, mean, sum.
        beta: b, up to which the loss is d^2 / (2 b), and above it |d| - b / 2.

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at |x - y| = b, where the result is 0.

    References:
        ATen smooth_l1_loss_double_backward.
    """
    inside = (input - target).abs() < beta
    return scaled(torch.where(inside, grad / (beta or 1), 0), reduction, input)


@formula
def huber_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """Cotangent of x, given that of the Huber loss of d = x - y: g min(max(d, -b), b) / n.

    Args:
        grad_output: g, (*), or a number for all where they are reduced.
        self: x, (*), real.
        target: y, (*).
        reduction: 0, 1 or 2 for none, mean, sum.
        delta: b, up to which the loss is d^2 / 2, and above it b (|d| - b / 2).

    Returns:
        The shape of ``self``.

    References:
        ATen huber_loss_backward, which has no forward derivative.
    """
    d = self - target
    slope = torch.where(d.abs() < delta, d, delta * d.detach().sign())
    return scaled(grad_output * slope, reduction, self)


@formula
def huber_loss_double_backward(grad: Tensor, input: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """Cotangent of x, given the product of that of the gradient and of that of the loss: h / n where |x - y| < b.

    Args:
        grad: h, (*), real.
        input: x, (*).
        target: y, (*).
        reduction: 0, 1 or 2 for none, mean, sum.
        delta: b, up to which the loss is d^2 / 2, and above it b (|d| - b / 2).

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at |x - y| = b, where the result is 0.

    References:
        ATen huber_loss_double_backward.
    """
    return scaled(torch.where((input - target).abs() < delta, grad, 0), reduction, input)


@formula
def huber_loss_double_backward_grad_output(
    grad: Tensor, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int, delta: float
) -> Tensor:
    """Cotangent of g, given h, that of the gradient: h min(max(d, -b), b) / n, summed where losses are reduced.

    Args:
        grad: h, (*), real.
        grad_output: g, of which only the shape is read.
        input: x, (*).
        target: y, (*).
        reduction: 0, 1 or 2 for none, mean, sum.
        delta: b, see `huber_loss_backward`.

    Returns:
        The shape of ``grad_output``.

    References:
        ATen huber_loss_double_backward_grad_output.
    """
    return fitted(huber_loss_backward(grad, input, target, reduction, delta), grad_output)


# -- the rules: what is said of one loss, with further arguments in `more` --------------------------------------------

Backward = Callable[..., Tensor]


def _difference(x: Tensor | None, y: Tensor | None) -> Tensor:
    """x - y, where None is zero."""
    if x is None:
        return -y  # type: ignore[operator]
    return x if y is None else x - y


def _bind(name: str, backward: Backward, double_backward: Backward, more: list[str], **about: Any) -> None:
    """The rules of a loss and of its backward.

    Args:
        name: of the loss, a function of x - y.
        backward: ``(grad, self, target, reduction, *more)``.
        double_backward: the same.
        more: the names of further arguments.
        about: of the rule for the backward.
    """

    def of_self(grad: Tensor, self: Tensor, target: Tensor, reduction: int, *rest: float) -> Tensor:
        return fitted(backward(grad, *paired(self, target), reduction, *rest), self)

    def of_target(grad: Tensor, self: Tensor, target: Tensor, reduction: int, *rest: float) -> Tensor:
        return fitted(backward(grad, *paired(target, self), reduction, *rest), target)

    def jvp(
        self_p: Tensor, self_t: Tensor | None, target_p: Tensor, target_t: Tensor | None, reduction: int, *rest: float
    ) -> Tensor:
        x, y = paired(self_p, target_p)
        return reduced(backward(_difference(self_t, target_t).expand(x.shape), x, y, NONE, *rest), reduction)

    def again_of_grad_output(
        grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, *rest: float
    ) -> Tensor:
        return fitted(backward(grad, *paired(self, target), reduction, *rest), grad_output)

    def again_of_self(
        grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, *rest: float
    ) -> Tensor:
        return fitted(double_backward(grad * grad_output, *paired(self, target), reduction, *rest), self)

    def again_of_target(
        grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, *rest: float
    ) -> Tensor:
        return fitted(-double_backward(grad * grad_output, *paired(self, target), reduction, *rest), target)

    def again_jvp(
        grad_output_p: Tensor,
        grad_output_t: Tensor | None,
        self_p: Tensor,
        self_t: Tensor | None,
        target_p: Tensor,
        target_t: Tensor | None,
        reduction: int,
        *rest: float,
    ) -> Tensor:
        x, y = paired(self_p, target_p)
        found = torch.zeros_like(x)
        if grad_output_t is not None:
            found = found + backward(grad_output_t, x, y, reduction, *rest)
        if self_t is not None or target_t is not None:
            moved = grad_output_p * _difference(self_t, target_t)
            found = found + double_backward(moved.expand(x.shape), x, y, reduction, *rest)
        return found

    first = ["grad", "self", "target", "reduction", *more]
    again = ["grad", "grad_output", *first[1:]]
    tangents = ["self_p", "self_t", "target_p", "target_t", "reduction", *more]
    uses = [f for f in (backward, double_backward) if f in _FORMULAS]
    source = f"ATen {name}_backward, {name}_double_backward"
    rule(
        f"aten::{name}",
        vjp={"self": bound_to(of_self, first), "target": bound_to(of_target, first)},
        jvp={"result": bound_to(jvp, tangents)},
        uses=uses,
        source=source,
        samples=lambda dtype, device: _samples(dtype, device, more),
    )
    rule(
        f"aten::{name}_backward",
        vjp={
            "grad_output": bound_to(again_of_grad_output, again),
            "self": bound_to(again_of_self, again),
            "target": bound_to(again_of_target, again),
        },
        jvp={"result": bound_to(again_jvp, ["grad_output_p", "grad_output_t", *tangents])},
        uses=uses,
        source=source,
        samples=lambda dtype, device: _backward_samples(dtype, device, more),
        **about,
    )


_LIMIT = 0.7  # beta or delta: some differences of the samples are below it, and none near it


def _samples(dtype: torch.dtype, device: torch.device | str, more: list[str]) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x, y = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
    for reduction in (NONE, MEAN, SUM):
        yield Sample(x, y, reduction, *[_LIMIT for _ in more])


def _backward_samples(dtype: torch.dtype, device: torch.device | str, more: list[str]) -> Iterable[Sample]:
    for sample in _samples(dtype, device, more):
        x, y, reduction, *rest = sample.args
        g = random(2, 3, dtype=dtype, device=device, seed=2)
        yield Sample(g if reduction == NONE else g[0, 0], x, y, reduction, *rest)


_FORMULAS = (mse_loss_double_backward, smooth_l1_loss_double_backward, huber_loss_backward, huber_loss_double_backward)
_bind(
    "mse_loss",
    aten.mse_loss_backward,
    lambda grad, self, target, reduction: mse_loss_double_backward(grad, self, reduction),
    [],
)
_bind("smooth_l1_loss", aten.smooth_l1_loss_backward, smooth_l1_loss_double_backward, ["beta"])
_bind("huber_loss", huber_loss_backward, huber_loss_double_backward, ["delta"], improves="missing")
