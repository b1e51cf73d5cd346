"""Samples of _sparse_addmm, sparse_sampled_addmm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import times_identity


def _matrix(layout: torch.layout, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    pattern = torch.tensor([[0, 1, 1], [1, 0, 0]], device=device)
    return (random(2, 3, dtype=dtype, device=device) * pattern).to_sparse(layout=layout)


@samples_for("aten::_sparse_addmm")
def sparse_addmm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Of the dense inputs: finite differences cannot move a sparse one."""
    bias = random(2, 2, dtype=dtype, device=device, seed=1)
    B = random(3, 2, dtype=dtype, device=device, seed=2)
    other = 0.5j - 1 if dtype.is_complex else 0.5
    yield Sample(bias, _matrix(torch.sparse_coo, dtype, device), B, beta=other, alpha=other)


@samples_for("aten::sparse_sampled_addmm")
def sampled_addmm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    A, B = (random(*s, dtype=dtype, device=device, seed=1) for s in ((2, 2), (2, 3)))
    other = 0.5j - 1 if dtype.is_complex else 0.5
    yield Sample(_matrix(torch.sparse_csr, dtype, device), A, B, alpha=other, beta=2)


probe_for("aten::sparse_sampled_addmm")(times_identity(torch.ops.aten.sparse_sampled_addmm))


@probe_for("aten::_sparse_addmm")
def sparse_addmm_probe(*args: Any, **kwargs: Any) -> Tensor:
    return torch.ops.aten._sparse_addmm(*args, **kwargs)  # a function: opcheck would check PyTorch's own operator
