"""Samples of _linalg_det, _linalg_slogdet."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random, random_conditioned


@samples_for("aten::_linalg_slogdet")
def slogdet(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield Sample(random_conditioned(3, 3, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, 4, dtype=dtype, device=device).mT)
    yield Sample(random_conditioned(2, 2, 2, dtype=dtype, device=device))
    yield Sample(random_conditioned(6, 6, dtype=dtype, device=device, least=0.5))
    yield Sample(random(1, 1, dtype=dtype, device=device))
    yield Sample(random(2, 0, 0, dtype=dtype, device=device))


@samples_for("aten::_linalg_det")
def det(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from slogdet(dtype, device)
    left, right = random(4, 4, dtype=dtype, device=device), random(4, 4, dtype=dtype, device=device, seed=1)
    yield Sample(torch.stack([left[:, :rank] @ right[:rank] for rank in (4, 3, 2)]))
    nilpotent = torch.ones(6, 6, dtype=dtype, device=device).triu(1)
    yield Sample(torch.stack([nilpotent, random_conditioned(6, 6, dtype=dtype, device=device)]))


probe_for("aten::_linalg_det")(torch.linalg.det)
probe_for("aten::_linalg_slogdet")(torch.linalg.slogdet)
