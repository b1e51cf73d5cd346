"""Samples of linalg_lstsq."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random, random_conditioned


@samples_for("aten::linalg_lstsq")
def lstsq(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def sample(A: Sequence[int], B: Sequence[int], *args: Any, **kwargs: Any) -> Sample:
        first = random_conditioned(*A, dtype=dtype, device=device)
        return Sample(first, random(*B, dtype=dtype, device=device, seed=1), *args, **kwargs)

    # gelsy, the default on the CPU, takes single columns only: it starts from uninitialized pivots, so that where it
    # exchanges columns its values differ from call to call in the last bits
    drivers = ("gels", "gelsd", "gelss") if torch.device(device).type == "cpu" else ("gels",)
    for driver in drivers:
        yield sample((4, 2), (4, 3), driver=driver)
        yield sample((2, 3), (2, 2), driver=driver)
    yield sample((4, 1), (4, 2))
    yield sample((2, 3, 3), (2, 3, 1), driver=drivers[-1])
    yield sample((1, 3, 2), (2, 3, 2), 1e-3, driver=drivers[-1])
    if len(drivers) > 1:
        yield sample((3, 3), (3, 2), 0.6, driver="gelsd")  # drops the least of the singular values 1, 1.7 and 2.4
    yield sample((0, 3, 2), (0, 3, 1), driver=drivers[0])
    yield sample((0, 2), (0, 3))
    A = random_conditioned(2, 4, dtype=dtype, device=device).mT
    yield Sample(A, random(4, 1, dtype=dtype, device=device, seed=1), driver=drivers[0])


@probe_for("aten::linalg_lstsq")
def lstsq_probe(self: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    X, L, *_ = torch.ops.aten.linalg_lstsq(self, b, *args, **kwargs)
    return X, L
