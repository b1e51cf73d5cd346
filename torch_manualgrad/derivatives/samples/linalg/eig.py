"""Samples of linalg_eig."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random, random_conditioned
from .eigh import projectors


@samples_for("aten::linalg_eig")
def eig(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 4), (1, 1), (0, 2, 2), (0, 0)):
        skewed = torch.diag_embed(torch.arange(shape[-1], device=device)).to(dtype)
        yield Sample(0.4 * random(*shape, dtype=dtype, device=device, seed=1) + skewed)
    yield Sample(random_conditioned(3, 3, dtype=dtype, device=device).mT)


@probe_for("aten::linalg_eig")
def eig_probe(A: Tensor) -> tuple[Tensor, Tensor]:
    L, V = torch.ops.aten.linalg_eig(A)
    return L, projectors(V)
