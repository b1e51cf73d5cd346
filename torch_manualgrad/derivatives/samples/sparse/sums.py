"""Samples of _sparse_sum, _sparse_softmax, _sparse_log_softmax and _sparse_sparse_matmul.

Finite differences cannot move a sparse tensor: tests/derivatives/test_sparse.py makes it from its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_manualgrad.core.rule import Sample, operator, probe_for, samples_for

from ..drawing import random
from .drawing import made_dense


def _samples(*args: Any, count: int = 1) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        pattern = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 1, 0]], device=device)
        x = [(random(3, 3, dtype=dtype, device=device, seed=i) * pattern).to_sparse() for i in range(count)]
        yield Sample(*x, *args)

    return samples


def _real(samples: Callable[..., Iterable[Sample]]) -> Callable[..., Iterable[Sample]]:
    return lambda dtype, device: () if dtype.is_complex else samples(dtype, device)


samples_for("aten::_sparse_sum.dim")(_samples([0]))
samples_for("aten::_sparse_softmax", "aten::_sparse_log_softmax")(_real(_samples(1, False)))
samples_for("aten::_sparse_sparse_matmul")(_samples(count=2))
for _name in ("_sparse_sum.dim", "_sparse_softmax", "_sparse_log_softmax", "_sparse_sparse_matmul"):
    probe_for(f"aten::{_name}")(made_dense(operator(f"aten::{_name}")))
