"""Samples of the linear cross entropy, with and without reduction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_manualgrad.core.rule import Sample, exists, operator, probe_for, samples_for

from ...loss.linear_cross_entropy import NAME
from ..drawing import in_one_precision, leaf, random


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[Any]:
    """x, W, y, b, weights."""
    if dtype.is_complex:
        return
    x, W, b = (leaf(random(*n, dtype=dtype, device=device, seed=k)) for k, n in enumerate(((3, 2), (4, 2), (4,))))
    y = torch.tensor([2, 0, 3], device=device)
    yield x, W, y, b, random(4, dtype=dtype, device=device, seed=3).abs()
    yield x, W, y, None, None


_CHUNKS = {"batch_chunk_size": 2, "acc_policy": "compact"}


def with_reduction(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for reduction, (x, W, y, b, weight) in zip(("mean", "sum"), _inputs(dtype, device)):
        rest = {"reduction": reduction, "ignore_index": 3, "label_smoothing": 0.0, **_CHUNKS, "acc_dtype": dtype}
        flags = {"allow_retain_graph": True, "compute_input_grad": True, "compute_linear_weight_grad": True}
        last = {"compute_linear_bias_grad": b is not None}
        yield Sample(x, W, target=y, linear_bias=b, weight=weight, **rest, **flags, **last)


def without_reduction(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, W, y, b, weight in _inputs(dtype, device):
        yield Sample(x, W, target=y, linear_bias=b, weight=weight, ignore_index=3, **_CHUNKS, acc_dtype=dtype)


if exists(NAME):  # since torch 2.13
    samples_for(NAME)(with_reduction)
    samples_for(f"{NAME}_no_reduction")(without_reduction)
    probe_for(NAME)(in_one_precision(lambda *args, **kwargs: operator(NAME)(*args, **kwargs)[0]))
    probe_for(f"{NAME}_no_reduction")(in_one_precision(operator(f"{NAME}_no_reduction")))
