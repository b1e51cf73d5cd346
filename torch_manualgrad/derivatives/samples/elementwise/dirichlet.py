"""Samples of the Dirichlet distribution."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

aten = torch.ops.aten


@samples_for("aten::_sample_dirichlet")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Of one component, which is 1 whatever is drawn."""
    if not dtype.is_complex:
        yield Sample(torch.tensor([[0.7], [3.0]], dtype=dtype, device=device))


probe_for("aten::_sample_dirichlet")(lambda alpha: torch.ops.aten._sample_dirichlet(alpha))
