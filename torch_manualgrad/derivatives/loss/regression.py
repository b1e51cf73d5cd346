"""Losses of $d = x - y$, one for each entry, which are then reduced: mse_loss, smooth_l1_loss and huber_loss.

With $f$ the loss of one entry, $g$ the cotangent, and $n$ the number of entries for a mean, else 1:

    backward         $g f'(d) / n$ for $x$, its negative for $y$,
    double backward  $h g f''(d) / n$ for $x$, given $h$, the cotangent of that for $x$.

Args:
    grad: $h$, (*), real.
    grad_output: $g$, (*), or a number for all if they are reduced.
    input: $x$, (*).
    reduction: 0, 1 or 2 for none, mean, sum.
    target: $y$, (*).
    delta: $b$, up to which the loss is $d^2 / 2$, and above it $b (|d| - b / 2)$.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import bound_to, formula, rule

from .common import NONE, fitted, of_all, paired, reduced, scaled

aten = torch.ops.aten


@formula
def mse_loss_double_backward(grad: Tensor, input: Tensor, reduction: int) -> Tensor:
    """Cotangent of $x$, given the product of those of the gradient and of the loss $(x - y)^2$: $2 h / n$.

    Args:
        input: $x$. Its entries are counted.

    Returns:
        The shape of ``grad``.
    """
    return scaled(2 * grad, reduction, input)


@formula
def smooth_l1_loss_double_backward(grad: Tensor, input: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Cotangent of $x$, given the product of those of the gradient and the loss: $h / (b n)$ where $|x - y| < b$.

    Args:
        beta: $b$, up to which the loss is $d^2 / (2 b)$, and above it $|d| - b / 2$.

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at $|x - y| = b$. The result is 0.
    """
    inside = (input - target).abs() < beta
    return scaled(torch.where(inside, grad / (beta or 1), 0), reduction, input)


@formula
def huber_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """Cotangent of $x$, given that of the Huber loss of $d = x - y$: $g min(max(d, -b), b) / n$.

    Args:
        self: $x$, (*), real.

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
    """Cotangent of $x$, given the product of those of the gradient and the loss: $h / n$ where $|x - y| < b$.

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at $|x - y| = b$. The result is 0.
    """
    return scaled(torch.where((input - target).abs() < delta, grad, 0), reduction, input)


@formula
def huber_loss_double_backward_grad_output(
    grad: Tensor, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int, delta: float
) -> Tensor:
    """Cotangent of $g$, given $h$, that of the gradient: $h min(max(d, -b), b) / n$, summed where losses are reduced.

    Args:
        grad_output: $g$. Only its shape is read.

    Returns:
        The shape of ``grad_output``.
    """
    return _double_of_g(huber_loss_backward, grad, grad_output, input, target, reduction, delta)


# -- the rules --------------------------------------------------------------------------------------------------------

# In the helpers, f is the backward of a loss, (g, x, y, reduction, limit), where the limit is its beta or delta. ff is
# its double backward, and of_g gives the cotangent of g.
Slope = Callable[..., Tensor]
Gradients = tuple[Tensor | None, ...]


def _difference(x: Tensor | None, y: Tensor | None) -> Tensor:
    """$x - y$, where None is zero."""
    if x is None:
        return -y  # type: ignore[operator]
    return x if y is None else x - y


def _vjp(
    f: Slope, mask: Sequence[bool], grad: Tensor, self: Tensor, target: Tensor, reduction: int, *limit: float
) -> Gradients:
    x, y = paired(self, target)
    grad, reduction = of_all(grad, x, reduction)
    of_self = fitted(f(grad, x, y, reduction, *limit), self) if mask[0] else None
    return of_self, fitted(f(grad, y, x, reduction, *limit), target) if mask[1] else None


def _jvp(
    f: Slope,
    self_p: Tensor,
    self_t: Tensor | None,
    target_p: Tensor,
    target_t: Tensor | None,
    reduction: int,
    *limit: float,
) -> Tensor:
    x, y = paired(self_p, target_p)
    return reduced(f(_difference(self_t, target_t).expand(x.shape), x, y, NONE, *limit), reduction)


def _double_of_g(
    f: Slope, grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, *limit: float
) -> Tensor:
    """Cotangent of $g$, the cotangent of a loss with the backward $f$."""
    return fitted(f(grad, self, target, reduction, *limit), grad_output)


def _double_vjp(
    of_g: Slope,
    ff: Slope,
    mask: Sequence[bool],
    grad: Tensor,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    reduction: int,
    *limit: float,
) -> Gradients:
    x, y = paired(self, target)
    grad, reduction = of_all(grad, x, reduction)
    found = of_g(grad, grad_output, x, y, reduction, *limit) if mask[0] else None
    if not (mask[1] or mask[2]):
        return found, None, None
    of_d = ff(grad * grad_output, x, y, reduction, *limit)
    return found, fitted(of_d, self) if mask[1] else None, fitted(-of_d, target) if mask[2] else None


def _backward_jvp(
    f: Slope,
    ff: Slope,
    grad_output_p: Tensor,
    grad_output_t: Tensor | None,
    self_p: Tensor,
    self_t: Tensor | None,
    target_p: Tensor,
    target_t: Tensor | None,
    reduction: int,
    *limit: float,
) -> Tensor:
    x, y = paired(self_p, target_p)
    found = torch.zeros_like(x)
    if grad_output_t is not None:
        grad, summed = of_all(grad_output_t, x, reduction)
        found = found + f(grad, x, y, summed, *limit)
    if self_t is not None or target_t is not None:
        moved = grad_output_p * _difference(self_t, target_t)
        found = found + ff(moved.expand(x.shape), x, y, reduction, *limit)
    return found


def _mse(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    return mse_loss_double_backward(grad, self, reduction)


_mse_of_g = partial(_double_of_g, aten.mse_loss_backward)
_smooth_l1_of_g = partial(_double_of_g, aten.smooth_l1_loss_backward)


def _loss(name: str, f: Slope, ff: Slope, of_g: Slope, *limit: str, improves: str = "") -> None:
    """The rules of a loss and of its backward operator.

    Args:
        name: of the loss, without ``aten::``.
        f: its backward.
        ff: the backward of that for $x$.
        of_g: the backward of that for $g$.
        limit: the name of the parameter, ``beta`` or ``delta``.
        improves: what the rule of the backward operator improves on PyTorch.
    """
    values = ["self", "target", "reduction", *limit]
    pairs = ["self_p", "self_t", "target_p", "target_t", "reduction", *limit]
    about: dict[str, Any] = {"improves": improves} if improves else {}
    rule(
        f"aten::{name}",
        vjp={("self", "target"): bound_to(lambda *given: _vjp(f, *given), ["output_mask", "grad", *values])},
        jvp={"result": bound_to(lambda *given: _jvp(f, *given), pairs)},
        source=f"ATen {name}_backward",
    )
    rule(
        f"aten::{name}_backward",
        vjp={
            ("grad_output", "self", "target"): bound_to(
                lambda *given: _double_vjp(of_g, ff, *given), ["output_mask", "grad", "grad_output", *values]
            )
        },
        jvp={
            "result": bound_to(lambda *given: _backward_jvp(f, ff, *given), ["grad_output_p", "grad_output_t", *pairs])
        },
        source=f"ATen {name}_double_backward",
        **about,
    )


_loss("mse_loss", aten.mse_loss_backward, _mse, _mse_of_g, improves="missing")
_loss("smooth_l1_loss", aten.smooth_l1_loss_backward, smooth_l1_loss_double_backward, _smooth_l1_of_g, "beta")
_loss(
    "huber_loss",
    huber_loss_backward,
    huber_loss_double_backward,
    huber_loss_double_backward_grad_output,
    "delta",
    improves="missing",
)
