"""Samples of geqrf."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random_conditioned


@samples_for("aten::geqrf")
def geqrf(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 4), (1, 1), (0, 3, 2)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))


@probe_for("aten::geqrf")
def geqrf_probe(A: Tensor) -> tuple[Tensor, Tensor]:
    return torch.geqrf(A)  # not the operator: opcheck needs a fake kernel, which PyTorch lacks
