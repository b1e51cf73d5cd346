"""Samples of mse_loss, smooth_l1_loss, huber_loss, and their backward operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ...loss.common import MEAN, NONE, SUM
from ..drawing import random

_LIMIT = 0.7  # some differences of the samples are below it, and none near it


def _samples(*limit: float) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x, y = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
        for reduction in (NONE, MEAN, SUM):
            yield Sample(x, y, reduction, *limit)

    return samples


def _backward_samples(*limit: float) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _samples(*limit)(dtype, device):
            x, y, reduction, *rest = sample.args
            g = random(2, 3, dtype=dtype, device=device, seed=2)
            yield Sample(g if reduction == NONE else g[0, 0], x, y, reduction, *rest)

    return samples


samples_for("aten::mse_loss")(_samples())
samples_for("aten::mse_loss_backward")(_backward_samples())
samples_for("aten::smooth_l1_loss", "aten::huber_loss")(_samples(_LIMIT))
samples_for("aten::smooth_l1_loss_backward", "aten::huber_loss_backward")(_backward_samples(_LIMIT))
