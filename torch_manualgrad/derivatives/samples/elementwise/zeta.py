"""Samples of the Hurwitz zeta function."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


@samples_for("aten::special_zeta")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        x = torch.tensor([[0.7, 1.3, 2.5], [0.4, 3.1, 1.9]], dtype=dtype, device=device)
        for s in (x.flip(0) + 1.2, x[0] + 0.9, x[1, 1]):
            yield Sample(s, x)
        yield Sample(torch.tensor(3, device=device), x[1, 1])
