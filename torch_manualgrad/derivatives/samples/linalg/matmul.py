"""Samples of _grouped_mm, _trilinear, addmm, mm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random


@samples_for("aten::mm")
def mm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for m, k, n in ((2, 3, 4), (1, 1, 1), (2, 0, 3), (0, 2, 3)):
        yield Sample(random(m, k, dtype=dtype, device=device), random(k, n, dtype=dtype, device=device, seed=1))
    A, B = random(3, 2, dtype=dtype, device=device), random(4, 3, dtype=dtype, device=device, seed=1)
    yield Sample(A.mT, B.mT)


@samples_for("aten::addmm")
def addmm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    A, B = random(2, 3, dtype=dtype, device=device), random(3, 4, dtype=dtype, device=device, seed=1)
    numbers = (2, 0.5j - 1) if dtype.is_complex else (2, 0.5)
    bias = random(2, 4, dtype=dtype, device=device, seed=2)
    for broadcast in (bias, bias[0], bias[:, :1], bias[0, 0]):
        yield Sample(broadcast.clone(), A, B, beta=numbers[0], alpha=numbers[1])
    yield Sample(bias, A, B, beta=numbers[1])
    yield Sample(bias, A.mT.contiguous().mT, B.mT.contiguous().mT, beta=0)


@samples_for("aten::_trilinear")
def trilinear(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def sample(*shapes: Sequence[int], dims: Sequence[Sequence[int]], **more: int) -> Sample:
        factors = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]
        return Sample(*factors, *map(list, dims), **more)

    yield sample((2, 3), (4, 3, 2), (2, 2), dims=([1, 3], [0], [1, 2], [2, 3]))  # bilinear
    yield sample((2, 3), (4, 3, 2), (2, 2), dims=([1, 3], [0], [1, 2], [2, 3]), unroll_dim=2)
    yield sample((2, 3), (2, 3), (2, 3), dims=([], [], [], []))
    yield sample((2,), (3,), (2, 3), dims=([1], [0], [], [0]))
    yield sample((3,), (3,), (3,), dims=([], [], [], [0]), unroll_dim=0)


@samples_for("aten::_grouped_mm")
def grouped_mm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """In single precision, the highest that the operator takes; every row is a multiple of 16 bytes."""
    if dtype.is_complex:
        return
    offs = torch.tensor([4, 8], dtype=torch.int32, device=device)
    for first, second in (((8, 4), (2, 4, 4)), ((2, 4, 4), (4, 8)), ((4, 8), (8, 4)), ((2, 4, 4), (2, 4, 8))):
        A, B = (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
            for seed, shape in enumerate((first, second))
        )
        yield Sample(A, B, offs if min(A.dim(), B.dim()) == 2 else None)


@probe_for("aten::_grouped_mm")
def grouped_mm_probe(self: Tensor, mat2: Tensor, offs: Tensor | None) -> Tensor:
    """The operator, on the strides that it takes; in double precision, for finite differences, its definition."""
    if self.dtype != torch.float64:
        offs = None if offs is None else offs.contiguous()
        return torch.ops.aten._grouped_mm(self.contiguous(), mat2.contiguous(), offs)
    if offs is None:
        return self @ mat2
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if mat2.dim() == 3:
        return torch.cat([self[part] @ mat2[i] for i, part in enumerate(parts)])
    if self.dim() == 3:
        return torch.cat([self[i] @ mat2[:, part] for i, part in enumerate(parts)], -1)
    return torch.stack([self[:, part] @ mat2[part] for part in parts])
