"""Samples of products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_manualgrad.core.rule import Sample, samples_for

from ..drawing import random


def _samples(*shapes: Sequence[Sequence[int]]) -> Callable[..., Iterable[Sample]]:
    """Two factors, also transposed in memory, and empty."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sizes in shapes:
            yield Sample(*(random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(sizes)))
        factors = [random(*s[::-1], dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes[0])]
        yield Sample(*(x.permute(*range(x.dim() - 1, -1, -1)) for x in factors))

    return samples


def _added_samples(added: Sequence[int], *factors: Sequence[int]) -> Callable[..., Iterable[Sample]]:
    """A term that is added in its full shape and broadcast, with 0, 1 and other numbers."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        x = random(*added, dtype=dtype, device=device, seed=9)
        given: list[Any] = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(factors)]
        other = 0.5j - 1 if dtype.is_complex else 0.5
        yield Sample(x, *given, beta=2, alpha=other)
        yield Sample(x[..., :1].clone(), *given, beta=other)
        yield Sample(x.reshape(-1)[0].clone(), *given, beta=0, alpha=other)

    return samples


_BATCHES = ((2, 2, 3), (2, 3, 2))


samples_for("aten::bmm")(_samples(_BATCHES, ((2, 1, 0), (2, 0, 2)), ((0, 2, 1), (0, 1, 2))))
samples_for("aten::baddbmm")(_added_samples((2, 2, 2), *_BATCHES))
samples_for("aten::addbmm")(_added_samples((2, 2), *_BATCHES))
samples_for("aten::mv")(_samples(((2, 3), (3,)), ((2, 0), (0,))))
samples_for("aten::addmv")(_added_samples((2,), (2, 3), (3,)))
samples_for("aten::addr")(_added_samples((2, 3), (2,), (3,)))
samples_for("aten::dot", "aten::vdot")(_samples(((3,), (3,)), ((0,), (0,))))
