"""Samples of _linalg_eigh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ...linalg.common import sym
from ..drawing import random_definite


def projectors(V: Tensor) -> Tensor:
    """v_i v_i^H, which have no phase."""
    return V.mT.unsqueeze(-1) * V.mH.unsqueeze(-2)


@samples_for("aten::_linalg_eigh")
def eigh(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 4), (1, 1), (0, 2, 2), (0, 0)):
        yield Sample(
            random_definite(*shape, dtype=dtype, device=device) - 2 * torch.eye(shape[-1], dtype=dtype, device=device)
        )
    yield Sample(random_definite(3, 3, dtype=dtype, device=device), "U")
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device).mT)


@probe_for("aten::_linalg_eigh")
def eigh_probe(A: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    L, V = torch.ops.aten._linalg_eigh(0.5 * sym(A), *args, **kwargs)
    return L, projectors(V)
