"""Samples of binary_cross_entropy, binary_cross_entropy_backward, binary_cross_entropy_with_logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ...loss.common import MEAN, NONE, SUM
from ..drawing import leaf, random


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Logits, targets, weights, reduction."""
    if dtype.is_complex:
        return
    x, t, w = (random(2, 3, dtype=dtype, device=device, seed=k) for k in range(3))
    yield x, t.sigmoid(), None, NONE
    yield x, t.sigmoid(), w.abs(), MEAN
    yield x, t.sigmoid(), w[0].abs(), SUM


def _probability(x: Tensor) -> Tensor:
    """A number between 0 and 1 and away from both, at every scale of positive numbers."""
    return (1 + x / (1 + x)) / 3


@samples_for("aten::binary_cross_entropy")
def binary_cross_entropy(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, t, weight, reduction in _inputs(dtype, device):
        yield Sample(leaf(x.sigmoid()), leaf(t), weight=weight, reduction=reduction)


@samples_for("aten::binary_cross_entropy_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, t, weight, reduction in _inputs(dtype, device):
        g = random(2, 3, dtype=dtype, device=device, seed=3)
        g = leaf(g if reduction == NONE else g[0, 0])
        yield Sample(g, leaf(x.sigmoid()), leaf(t), weight=weight, reduction=reduction)


@samples_for("aten::binary_cross_entropy_with_logits")
def with_logits(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, t, weight, reduction in _inputs(dtype, device):
        p = None if weight is None else random(3, dtype=dtype, device=device, seed=4).abs()
        yield Sample(leaf(x), leaf(t), weight=weight, pos_weight=p, reduction=reduction)


@probe_for("aten::binary_cross_entropy")
def binary_cross_entropy_probe(self: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    return torch.ops.aten.binary_cross_entropy(_probability(self), _probability(target), **kwargs)


@probe_for("aten::binary_cross_entropy_backward")
def backward_probe(grad_output: Tensor, self: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    probabilities = _probability(self), _probability(target)
    return torch.ops.aten.binary_cross_entropy_backward(grad_output, *probabilities, **kwargs)
