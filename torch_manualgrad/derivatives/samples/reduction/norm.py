"""Samples of vector norms."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import spread

_ORDERS = (2.0, 3.0, 1.0, 0.5, 1.5, 2.5, 4.0, -1.0, -2.5, 0.0, math.inf, -math.inf)


@samples_for("aten::norm.Scalar")
def whole_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _ORDERS:
        yield Sample(spread((3, 4), dtype, device), p)
    yield Sample(spread((), dtype, device), 3.0)
    yield Sample(spread((3, 4), dtype, device).mT, 2.5)
    yield Sample(spread((0,), dtype, device), 2.0)


@samples_for("aten::norm.ScalarOpt_dim")
def norm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _ORDERS:
        yield Sample(spread((3, 4, 2), dtype, device), p, [1])
    for dim, keepdim in (([0, -1], False), ([-1, 0], True), ([], False)):
        yield Sample(spread((3, 4, 2), dtype, device), 2.5, dim, keepdim)
    yield Sample(spread((), dtype, device), 3.0, [-1], True)
    yield Sample(spread((3, 0), dtype, device), 2.0, [0], True)
    yield Sample(spread((3, 4, 2), dtype, device).mT, None, [1], False)


@samples_for("aten::linalg_vector_norm")
def vector_norm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in norm_samples(dtype, device):
        x, p, *rest = sample.args
        yield Sample(x, 2.0 if p is None else p, *rest)
    yield Sample(spread((3, 4), dtype, device))
    yield Sample(spread((3, 4), dtype, device), 3.0, dtype=torch.promote_types(dtype, torch.float64))


@samples_for("aten::norm.ScalarOpt_dtype")
def norm_dtype_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return  # this forward takes no dtype for complex input
    for p in (None, 3.0, 1.5, math.inf):
        yield Sample(spread((3, 4), dtype, device), p, dtype=torch.float64)


@samples_for("aten::norm.ScalarOpt_dim_dtype")
def norm_dim_dtype_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    for p, keepdim in ((None, False), (3.0, True), (1.5, False), (-1.0, True)):
        yield Sample(spread((3, 4), dtype, device), p, [1], keepdim, dtype=torch.float64)


@samples_for("aten::dist")
def dist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _ORDERS:
        yield Sample(spread((3, 4), dtype, device), spread((3, 4), dtype, device, 1), p)
    yield Sample(spread((3, 1, 2), dtype, device), spread((4, 1), dtype, device, 1), 2.5)
    yield Sample(spread((), dtype, device), spread((3,), dtype, device, 1))
