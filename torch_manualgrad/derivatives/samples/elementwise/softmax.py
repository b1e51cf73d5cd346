"""Samples of softmax, log_softmax and their backward operators."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


@samples_for("aten::_softmax", "aten::_log_softmax")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(-2.3, 2.9, 24, dtype=dtype, device=device).reshape(2, 4, 3).sin() * 2
    yield from (Sample(x, 1, False), Sample(x, -1, False), Sample(x[0, :, 0], 0, False), Sample(x[0, 0, 0], 0, False))


@samples_for("aten::_safe_softmax")
def safe_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in samples(dtype, device)):
        yield Sample(x, dim)


@samples_for("aten::_softmax_backward_data")
def backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in samples(dtype, device)):
        if x.dim():  # PyTorch's vmap of the backward operators is wrong for tensors without dimensions
            yield Sample(x.cos(), x.softmax(dim), dim, dtype)


@samples_for("aten::_log_softmax_backward_data")
def log_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in samples(dtype, device)):
        if x.dim():
            yield Sample(x.cos(), x.log_softmax(dim), dim, dtype)
