"""Samples of nll_loss and nll_loss2d, and of their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ...loss.common import MEAN, NONE, SUM
from ..drawing import in_one_precision, leaf, random

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


def _samples(*shape: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for x, target, weight, reduction, ignored in _inputs(shape, dtype, device):
            yield Sample(leaf(x), target=target, weight=weight, reduction=reduction, ignore_index=ignored)

    return samples


def _backward_samples(forward: Callable[..., Any], *shape: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for x, target, weight, reduction, ignored in _inputs(shape, dtype, device):
            loss, total = forward(x, target, weight, reduction, ignored)
            g = leaf(random(*loss.shape, dtype=dtype, device=device, seed=2))
            rest = {"weight": weight, "reduction": reduction, "ignore_index": ignored, "total_weight": total}
            yield Sample(g, leaf(x), target=target, **rest)

    return samples


def _loss(forward: Callable[..., Any]) -> Callable[..., Tensor]:
    return in_one_precision(lambda *args, **kwargs: forward(*args, **kwargs)[0])


def _backward_probe(forward: Callable[..., Any], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The backward with the sum of its own weights, whatever total_weight is."""

    def probe(grad_output: Tensor, self: Tensor, total_weight: Tensor, **rest: Any) -> Tensor:
        total = forward(self.detach(), **rest)[1]
        return backward(grad_output, self.contiguous(), total_weight=total.detach(), **rest)

    return in_one_precision(probe)


samples_for("aten::nll_loss_forward")(_samples())
samples_for("aten::nll_loss_backward")(_backward_samples(aten.nll_loss_forward))
samples_for("aten::nll_loss2d_forward")(_samples(1, 2))
samples_for("aten::nll_loss2d_backward")(_backward_samples(aten.nll_loss2d_forward, 1, 2))
probe_for("aten::nll_loss_forward")(_loss(aten.nll_loss_forward))
probe_for("aten::nll_loss_backward")(_backward_probe(aten.nll_loss_forward, aten.nll_loss_backward))
probe_for("aten::nll_loss2d_forward")(_loss(aten.nll_loss2d_forward))
probe_for("aten::nll_loss2d_backward")(_backward_probe(aten.nll_loss2d_forward, aten.nll_loss2d_backward))
