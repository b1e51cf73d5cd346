"""Samples of the backward of RMS normalization, an operator of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from .batch_norm import drawn_on_gpu, gpu_inputs

_EPS = 0.1
_NAME = "aten::_fused_rms_norm_backward"


@samples_for(_NAME)
def rms_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if given := gpu_inputs(dtype):
        x, weight = given[0].mT.contiguous(), given[1]
        rstd = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        yield Sample(drawn_on_gpu(*x.shape, dtype=dtype, seed=3), x, [2], rstd, weight, [True, True])


@probe_for(_NAME)
def rms_norm_probe(g: Tensor, x: Tensor, shape: Sequence[int], _: Tensor, weight: Tensor, mask: Sequence[bool]) -> Any:
    """The backward with the statistics of its own input, whatever statistics it is given."""
    rstd = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    return torch.ops.aten._fused_rms_norm_backward(g, x, shape, rstd, weight, mask)
