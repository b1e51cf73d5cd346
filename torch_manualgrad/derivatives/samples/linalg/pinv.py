"""Samples of linalg_pinv.atol_rtol_tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random_conditioned


@samples_for("aten::linalg_pinv.atol_rtol_tensor")
def pinv(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 4), (1, 1), (0, 3, 2), (3, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 3, 2, dtype=dtype, device=device).mT)
    tolerance = torch.tensor(1e-3, device=device, dtype=torch.float64)
    yield Sample(random_conditioned(3, 2, dtype=dtype, device=device), atol=tolerance, rtol=tolerance)
    A = random_conditioned(3, 3, dtype=dtype, device=device)  # singular values 1, 1.7 and 2.4
    yield Sample(A, atol=torch.tensor(1.3, device=device, dtype=torch.float64))
    yield Sample(A + A.mH, hermitian=True)


@probe_for("aten::linalg_pinv.atol_rtol_tensor")
def pinv_probe(self: Tensor, *, hermitian: bool = False, **tolerances: Any) -> Tensor:
    A = 0.5 * (self + self.mH) if hermitian else self
    return torch.ops.aten.linalg_pinv.atol_rtol_tensor(A, hermitian=hermitian, **tolerances)
