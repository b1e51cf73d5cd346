"""Samples of _fft_c2c, _fft_c2r, _fft_r2c."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from .drawing import random


@samples_for("aten::_fft_c2c")
def c2c(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    dtype = dtype.to_complex()
    yield Sample(random(5, dtype=dtype, device=device), [0], 0, True)
    yield Sample(random(2, 3, 2, dtype=dtype, device=device), [0, 2], 1, True)
    yield Sample(random(3, 4, dtype=dtype, device=device), [1], 2, False)


@samples_for("aten::_fft_r2c")
def r2c(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    yield Sample(random(5, dtype=dtype, device=device), [0], 0, True)
    yield Sample(random(4, 3, dtype=dtype, device=device), [1, 0], 1, True)
    yield Sample(random(2, 4, 2, dtype=dtype, device=device), [0, 1], 2, True)
    yield Sample(random(3, 4, dtype=dtype, device=device), [1], 2, False)
    yield Sample(random(1, dtype=dtype, device=device), [0], 0, True)


@samples_for("aten::_fft_c2r")
def c2r(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    dtype = dtype.to_complex()
    yield Sample(random(3, dtype=dtype, device=device), [0], 0, 5)
    yield Sample(random(3, 2, dtype=dtype, device=device), [1, 0], 1, 4)
    yield Sample(random(2, 2, 3, dtype=dtype, device=device), [0, 2], 2, 5)
    yield Sample(random(1, dtype=dtype, device=device), [0], 0, 1)
