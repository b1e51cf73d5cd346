"""Samples of functions of signs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for


@samples_for("aten::abs", "aten::sgn", "aten::angle")
def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.tensor([[0.7, -1.3, 2.5], [-0.4, 3.1, -1.9]], dtype=torch.float64, device=device)
    x = torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype)
    yield from (Sample(x), Sample(x[0, 1]), Sample(x[:0]))


samples_for("aten::frexp.Tensor")(lambda dtype, device: [] if dtype.is_complex else samples(dtype, device))
probe_for("aten::frexp.Tensor")(lambda self: torch.frexp(self).mantissa)
