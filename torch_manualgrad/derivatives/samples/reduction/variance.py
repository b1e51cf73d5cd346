"""Samples of variances and standard deviations."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


@samples_for("aten::var.correction", "aten::std.correction", "aten::var_mean.correction", "aten::std_mean.correction")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x)
    yield Sample(x, [1], correction=0)
    yield Sample(x.mT, [0, -1], correction=1.5, keepdim=True)
