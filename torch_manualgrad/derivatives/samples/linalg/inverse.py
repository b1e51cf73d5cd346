"""Samples of linalg_inv_ex."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random_conditioned


@samples_for("aten::linalg_inv_ex")
def inverse(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (0, 2, 2)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
