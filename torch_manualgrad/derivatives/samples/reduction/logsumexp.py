"""Samples of logsumexp."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread


@samples_for("aten::logsumexp")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x, [1])
    yield Sample(x.mT, [0, -1], True)
    yield Sample(torch.where(x == x[0, 1, 1], -torch.inf, x), [-2]) if not dtype.is_complex else Sample(x, [0])
    yield Sample(spread((), dtype, device), [-1])
    yield Sample(spread((0, 2), dtype, device), [1])
