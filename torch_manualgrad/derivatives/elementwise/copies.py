"""Copies: clone, conversions of dtype and device, conj; constants that are written into a tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.elementwise import elementwise
from torch_manualgrad.core.linear import linear_in
from torch_manualgrad.core.rule import Sample


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = torch.linspace(-2.3, 2.9, 6, dtype=torch.float64, device=device).reshape(2, 3)
    x = torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype)
    yield from (Sample(x), Sample(x[0, 0]), Sample(x[:0]))


for name in ("clone", "lift", "_lazy_clone"):
    linear_in(f"aten::{name}", {"self": lambda grad: grad}, samples=_samples)
linear_in("aten::_conj_physical", {"self": lambda grad: grad.conj_physical()}, samples=_samples)
elementwise("aten::zero", lambda: None)
elementwise("aten::fill.Scalar", lambda: None, arguments=[{"value": 2.5}])
