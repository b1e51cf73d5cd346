"""Samples of linalg_householder_product, ormqr."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random


@samples_for("aten::linalg_householder_product")
def householder_product(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape, k in (((3, 3), 3), ((2, 4, 3), 2), ((4, 2), 2), ((2, 3, 1), 1), ((3, 2), 0)):
        yield Sample(
            random(*shape, dtype=dtype, device=device), random(*shape[:-2], k, dtype=dtype, device=device, seed=1)
        )


@samples_for("aten::ormqr")
def ormqr(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for left in (True, False):
        for transpose in (False, True):
            for *batch, q, k in ((3, 2), (2, 2, 3)):  # the second ignores a column
                reflectors = random(*batch, q, k, dtype=dtype, device=device)
                tau = random(*batch, min(q, k), dtype=dtype, device=device, seed=1)
                other = random(*batch, *((q, 2) if left else (2, q)), dtype=dtype, device=device, seed=2)
                yield Sample(reflectors, tau, other, left, transpose)
