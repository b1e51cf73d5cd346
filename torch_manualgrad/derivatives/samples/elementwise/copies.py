"""Samples of copies and conversions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


@samples_for("aten::clone", "aten::_lazy_clone", "aten::_conj_physical")
def copies(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.linspace(-2.3, 2.9, 6, dtype=torch.float64, device=device).reshape(2, 3)
    x = torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype)
    yield from (Sample(x), Sample(x[0, 0]), Sample(x[:0]))


@samples_for("aten::_to_copy")
def to_copycopies(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, number, _ = (s.args[0] for s in copies(dtype, device))
    yield from (Sample(x), Sample(number, dtype=torch.complex128), Sample(x.T, memory_format=torch.contiguous_format))
