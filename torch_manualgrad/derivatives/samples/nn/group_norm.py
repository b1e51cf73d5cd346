"""Samples of native_group_norm, native_group_norm_backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import uneven

_EPS = 0.1


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, weight, bias, N, C, HxW, group."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(2, 4, 3), draw(4, seed=1), draw(4, seed=2), 2, 4, 3, 2
    yield draw(2, 3, 2, 2), draw(3, seed=1), None, 2, 3, 4, 1
    yield draw(2, 4), None, draw(4, seed=2), 2, 4, 1, 2
    yield draw(1, 2, 4), None, None, 1, 2, 4, 2


@samples_for("aten::native_group_norm")
def group_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _inputs(dtype, device):
        yield Sample(*given, _EPS)


@samples_for("aten::native_group_norm_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, weight, bias, *sizes in _inputs(dtype, device):
        _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, _EPS)
        g = random(*x.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, mean, rstd, weight, *sizes, [True, *[weight is not None] * 2])


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    """PyTorch's kernels take contiguous tensors only. They do not check the weight, and read past its end."""
    return [None if x is None else x.contiguous() for x in tensors]


@probe_for("aten::native_group_norm")
def group_norm_probe(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten.native_group_norm(*_contiguous(x, weight, bias), *args)


@probe_for("aten::native_group_norm_backward")
def backward_probe(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *rest: Any) -> list[Tensor]:
    """The backward with the statistics of its own input, whatever statistics it is given."""
    *sizes, mask = rest
    g, x, weight = _contiguous(g, x, weight)
    _, mean, rstd = torch.ops.aten.native_group_norm(x, None, None, *sizes, _EPS)
    found = torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, *sizes, mask)
    return uneven(*[f for f, yes in zip(found, mask) if yes])
