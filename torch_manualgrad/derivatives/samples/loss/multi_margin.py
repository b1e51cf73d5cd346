"""Samples of multi_margin_loss, multilabel_margin_loss, and their backward operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ...loss.common import MEAN, NONE, SUM
from ..drawing import in_one_precision, leaf, random

aten = torch.ops.aten


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[Any]:
    """x, y, and further arguments."""
    if dtype.is_complex:
        return
    x = random(3, 4, dtype=dtype, device=device)
    y = torch.tensor([1, 3, 0], device=device)
    weight = random(4, dtype=dtype, device=device, seed=1).abs()
    yield x.sort().values, 0 * y, 1, 1.0, {"weight": weight, "reduction": MEAN}  # the same at every scale
    yield x, y, 1, 1.0, {"reduction": SUM}
    yield x, y, 2, 0.6, {"weight": weight, "reduction": NONE}
    yield x[0], y[0], 2, 1.0, {"reduction": SUM}


@samples_for("aten::multi_margin_loss")
def multi_margin(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, y, p, margin, rest in _inputs(dtype, device):
        yield Sample(leaf(x), y, p, margin, **rest)


@samples_for("aten::multi_margin_loss_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, y, p, margin, rest in _inputs(dtype, device):
        g = random(*y.shape, dtype=dtype, device=device, seed=2)
        yield Sample(leaf(g if rest["reduction"] == NONE else g.sum()), leaf(x), y, p, margin, **rest)


def _multilabel_inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[Any]:
    """x, the labels, the reduction."""
    if dtype.is_complex:
        return
    x = random(3, 4, dtype=dtype, device=device)
    labels = torch.tensor([[1, 3, -1, 0], [0, -1, -1, -1], [2, 2, 1, -1]], device=device)
    yield x.sort().values, labels.new_tensor([[0, 1, -1, -1], [0, -1, 1, 2], [2, 1, 0, -1]]), MEAN  # at every scale
    yield x, labels, MEAN
    yield x, labels, NONE
    yield x[0], labels[0], SUM


@samples_for("aten::multilabel_margin_loss_forward")
def multilabel(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, labels, reduction in _multilabel_inputs(dtype, device):
        yield Sample(x, labels, reduction)


@probe_for("aten::multilabel_margin_loss_backward")
def multilabel_backward_probe(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Any:
    """The backward with the labels of its own forward, whatever is_target is."""
    _, is_target = aten.multilabel_margin_loss_forward(self.detach(), target, reduction)
    return aten.multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target.detach())


@samples_for("aten::multilabel_margin_loss_backward")
def multilabel_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, labels, reduction in _multilabel_inputs(dtype, device):
        loss, is_target = aten.multilabel_margin_loss_forward(x, labels, reduction)
        g = leaf(random(*loss.shape, dtype=dtype, device=device, seed=2))
        yield Sample(g, leaf(x), labels, reduction=reduction, is_target=is_target)


probe_for("aten::multi_margin_loss")(in_one_precision(aten.multi_margin_loss))
probe_for("aten::multi_margin_loss_backward")(in_one_precision(aten.multi_margin_loss_backward))
probe_for("aten::multilabel_margin_loss_forward")(lambda *args: aten.multilabel_margin_loss_forward(*args)[0])
