"""Samples of linalg_lu, linalg_lu_factor_ex and lu_unpack."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random


def _matrices(dtype: torch.dtype, device: torch.device | str) -> Iterable[Tensor]:
    for shape in ((3, 3), (2, 4, 2), (2, 2, 4), (2, 1, 3, 3), (1, 1), (0, 2, 2)):
        yield random(*shape, dtype=dtype, device=device, seed=3)
    yield random(3, 4, dtype=dtype, device=device, seed=4).mT


@samples_for("aten::linalg_lu", "aten::linalg_lu_factor_ex")
def lu(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    return map(Sample, _matrices(dtype, device))


@samples_for("aten::lu_unpack")
def lu_unpack(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for A in _matrices(dtype, device):
        yield Sample(*torch.linalg.lu_factor(A))
