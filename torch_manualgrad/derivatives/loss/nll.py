"""The negative log likelihood of given classes: linear in the log-probabilities.

What the operators return beside the loss, the sum of the weights, depends on the classes only. PyTorch's backward in two
dimensions refuses log-probabilities that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, rule

from .common import MEAN, NONE, SUM, in_one_precision, leaf, random

aten = torch.ops.aten

_IGNORED = 2


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Log-probabilities, classes, weights, reduction, the class that is ignored."""
    if dtype.is_complex:
        return
    x = random(2, 3, *shape, dtype=dtype, device=device)
    target = torch.arange(x[:, 0].numel(), device=device).reshape(2, *shape) % 3
    weight = random(3, dtype=dtype, device=device, seed=1).abs()
    yield x, target, weight, MEAN, _IGNORED
    yield x, target, weight, NONE, -100
    yield x, target, None, SUM, _IGNORED


def _bind(forward: Callable[..., Any], backward: Callable[..., Tensor], name: str, *shape: int, **about: Any) -> None:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for x, target, weight, reduction, ignored in _inputs(shape, dtype, device):
            yield Sample(leaf(x), target=target, weight=weight, reduction=reduction, ignore_index=ignored)

    def backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for x, target, weight, reduction, ignored in _inputs(shape, dtype, device):
            loss, total = forward(x, target, weight, reduction, ignored)
            g = leaf(random(*loss.shape, dtype=dtype, device=device, seed=2))
            rest = {"weight": weight, "reduction": reduction, "ignore_index": ignored, "total_weight": total}
            yield Sample(g, leaf(x), target=target, **rest)

    rule(
        f"aten::{name}_forward",
        vjp={
            "self": lambda grad_output, self, target, weight, reduction, ignore_index, total_weight: backward(
                grad_output, self.contiguous(), target, weight, reduction, ignore_index, total_weight
            )
        },
        jvp={
            "output": lambda self_t, target, weight, reduction, ignore_index: forward(
                self_t, target, weight, reduction, ignore_index
            )[0]
        },
        not_differentiable="total_weight",
        kind="linear",
        finite=False,  # weights may be anything
        source="ATen derivatives.yaml",
        samples=samples,
        probe=in_one_precision(lambda *args, **kwargs: forward(*args, **kwargs)[0]),
        **about,
    )
    rule(
        f"aten::{name}_backward",
        vjp={
            "grad_output": lambda grad, target, weight, reduction, ignore_index: forward(
                grad, target, weight, reduction, ignore_index
            )[0],
            "self": lambda grad, self_sizes, self_dtype: grad.new_zeros(self_sizes, dtype=self_dtype),
        },
        jvp={
            "result": lambda grad_output_t, self_p, target, weight, reduction, ignore_index, total_weight: (
                None
                if grad_output_t is None
                else backward(grad_output_t, self_p.contiguous(), target, weight, reduction, ignore_index, total_weight)
            )
        },
        kind="linear",
        finite=False,  # weights may be anything
        source="ATen derivatives.yaml",
        samples=backward_samples,
        probe=in_one_precision(lambda grad_output, self, **kwargs: backward(grad_output, self.contiguous(), **kwargs)),
    )


_bind(aten.nll_loss_forward, aten.nll_loss_backward, "nll_loss")
_bind(
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    "nll_loss2d",
    1,
    2,
    defer_to_stock=lambda self, *_: self.is_contiguous(),
    improves="missing",
)
