"""Samples of linalg_qr."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random, random_conditioned


@samples_for("aten::linalg_qr")
def qr(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    # not with mode "r": under vmap torch's forward returns a Q that cannot be read
    for shape in ((3, 3), (2, 4, 2), (2, 4)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 3, dtype=dtype, device=device), "complete")
    yield Sample(random(3, 2, dtype=dtype, device=device).mT, "complete")
    yield Sample(random(0, 3, 2, dtype=dtype, device=device))
