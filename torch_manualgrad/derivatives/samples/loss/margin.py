"""Samples of soft_margin_loss, soft_margin_loss_backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ...loss.common import MEAN, NONE, SUM
from ..drawing import leaf, random


@samples_for("aten::soft_margin_loss")
def margin(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x, y = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
    for reduction in (NONE, MEAN, SUM):
        yield Sample(leaf(x), target=y.sign(), reduction=reduction)


@samples_for("aten::soft_margin_loss_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in margin(dtype, device):
        g = random(2, 3, dtype=dtype, device=device, seed=2)
        yield Sample(leaf(g if sample.kwargs["reduction"] == NONE else g[0, 0]), *sample.args, **sample.kwargs)
