"""Samples of _linalg_svd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random_conditioned


@samples_for("aten::_linalg_svd")
def svd(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 3), (1, 1), (0, 3, 2), (2, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, dtype=dtype, device=device).mT)
    yield Sample(random_conditioned(4, 2, dtype=dtype, device=device), True)
    yield Sample(random_conditioned(2, 2, 3, dtype=dtype, device=device), True)


@probe_for("aten::_linalg_svd")
def svd_probe(A: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Functions that do not depend on the phases: products of paired vectors, and projectors onto the complements."""
    U, S, Vh = torch.ops.aten._linalg_svd(A, *args, **kwargs)
    k = S.shape[-1]
    pairs = U[..., :k].mT.unsqueeze(-1) * Vh[..., :k, :].unsqueeze(-2)
    return S, pairs, U[..., k:] @ U[..., k:].mH, Vh[..., k:, :].mH @ Vh[..., k:, :]
