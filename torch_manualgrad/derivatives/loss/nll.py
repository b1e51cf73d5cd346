"""The negative log likelihood of given classes: linear in the log-probabilities.

The second output of the operators, the sum of the weights, depends on the classes only. PyTorch's backward in two
dimensions raises for log-probabilities that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, bind, rule

from ..nn.normalization import widened
from ..terms import sum_over_tangents
from .common import MEAN, reduced

aten = torch.ops.aten


def _losses(x: Tensor, target: Tensor, weight: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """$-w x$ and $w$ at the class of each target, or 0 for the ignored class; $x$ is (N, C, *) or (C,)."""
    counted = target != ignored
    classes = target.where(counted, 0)
    of_class = weight[classes].where(counted, 0)
    dim = 1 if x.dim() > 1 else 0
    losses = -of_class * x.gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    return losses.where(counted, 0), of_class  # 0 times infinity in between


def _weight_jvp(
    weight_t: Tensor, weight_p: Tensor, self_p: Tensor, target: Tensor, reduction: int, ignore_index: int
) -> Tensor:
    """Tangent of the loss, given that of the weights. A mean is divided by the sum of weights, $W$: $(dS - L dW) / W$."""
    losses, of_class = _losses(self_p, target, weight_t, ignore_index)
    if reduction != MEAN:
        return reduced(losses, reduction)
    known, total = _losses(self_p, target, weight_p, ignore_index)
    return (losses.sum() - known.sum() / total.sum() * of_class.sum()) / total.sum()


def _weight_backward_jvp(
    weight_t: Tensor,
    weight_p: Tensor,
    grad_output_p: Tensor,
    self_p: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """Tangent of the gradient, given that of the weights."""
    x = self_p.contiguous()
    if reduction == MEAN:
        _, of_class = _losses(x, target, weight_t, ignore_index)
        _, total = _losses(x, target, weight_p, ignore_index)
        W = total.sum()
        weight_t = weight_t / W - weight_p * (of_class.sum() / (W * W))
    slope, of_class = torch.zeros_like(x), _losses(x, target, weight_t, ignore_index)[1]
    dim = 1 if x.dim() > 1 else 0
    classes = target.where(target != ignore_index, 0)
    return slope.scatter(dim, classes.unsqueeze(dim), (-grad_output_p * of_class).unsqueeze(dim))


def _by_class(entries: Tensor, weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The sums of entries over the targets of each class, in the shape of the weights; the ignored class is left out."""
    counted = target != ignored
    classes = target.where(counted, 0).reshape(-1)
    return torch.zeros_like(weight).index_add(0, classes, entries.where(counted, 0).reshape(-1))


def _weight_vjp(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor, reduction: int, ignore_index: int
) -> Tensor:
    """Cotangent of the weights, given that of the loss: the transpose of `_weight_jvp`. Sums are in at least float32."""
    grad, x, w = widened(grad_output, self, weight)
    losses, _ = _losses(x, target, torch.ones_like(w), ignore_index)
    if reduction == MEAN:
        known, total = _losses(x, target, w, ignore_index)
        losses = (losses - known.sum() / total.sum()) / total.sum()
    return _by_class(grad * losses, w, target, ignore_index).to(weight.dtype)


def _weight_backward_vjp(
    grad: Tensor, grad_output: Tensor, target: Tensor, weight: Tensor, reduction: int, ignore_index: int
) -> Tensor:
    """Cotangent of the weights, given that of the gradient: the transpose of `_weight_backward_jvp`."""
    h, g, w = widened(grad, grad_output, weight)
    slopes, _ = _losses(h, target, torch.ones_like(w), ignore_index)
    found = _by_class(g * slopes, w, target, ignore_index)
    if reduction == MEAN:
        counts = _by_class(torch.ones_like(slopes), w, target, ignore_index)
        W = (counts * w).sum()
        found = found / W - counts * ((found * w).sum() / (W * W))
    return found.to(weight.dtype)


def _is_constant(weight: Tensor | None) -> bool:
    return weight is None or not weight.requires_grad


def _bind(forward: Callable[..., Any], backward: Callable[..., Tensor], name: str, **about: Any) -> None:
    """The rules of a loss and of its backward operator."""

    def losses(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
        return forward(x, target, weight, reduction, ignore_index)[0]

    def of_self(
        grad_output: Tensor,
        self: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        total_weight: Tensor,
    ) -> Tensor:
        return backward(grad_output, self.contiguous(), target, weight, reduction, ignore_index, total_weight)

    rule(
        f"aten::{name}_forward",
        vjp={"self": of_self, "weight": _weight_vjp},
        jvp={"output": sum_over_tangents(bind(losses, x="self_t", weight="weight_p"), _weight_jvp)},
        not_differentiable="total_weight",
        kind="linear",
        finite=False,  # weights may be anything
        source="ATen derivatives.yaml",
        **about,
    )
    rule(
        f"aten::{name}_backward",
        vjp={
            "grad_output": bind(losses, x="grad"),
            "self": lambda grad, self_sizes, self_dtype: grad.new_zeros(self_sizes, dtype=self_dtype),
            "weight": _weight_backward_vjp,
            "total_weight": lambda: None,  # a function of the weights: their derivative includes it
        },
        jvp={
            "result": sum_over_tangents(
                bind(of_self, grad_output="grad_output_t", self="self_p", weight="weight_p"),
                _weight_backward_jvp,
            )
        },
        improves=(
            "values",
            "missing",
        ),  # to PyTorch the weights are constants in forward mode; in reverse mode it raises
        defer_to_stock=ByMetadata(lambda grad_output, self, target, weight, *_: _is_constant(weight)),
        kind="linear",
        finite=False,  # weights may be anything
        source="ATen derivatives.yaml",
    )


_bind(
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    "nll_loss",
    defer_to_stock=ByMetadata(lambda self, target, weight, *_: _is_constant(weight)),
    improves=("values", "missing"),
)
_bind(
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    "nll_loss2d",
    defer_to_stock=ByMetadata(lambda self, target, weight, *_: self.is_contiguous() and _is_constant(weight)),
    improves="missing",
)
