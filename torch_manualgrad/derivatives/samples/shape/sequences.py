"""Samples of _pack_padded_sequence."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import distinct

aten = torch.ops.aten


@samples_for("aten::_pack_padded_sequence")
def packed(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    lengths = torch.tensor([3, 1])
    yield Sample(distinct(4, 2, 2, dtype=dtype, device=device), lengths, False)
    yield Sample(distinct(2, 3, dtype=dtype, device=device), lengths, True)


probe_for("aten::_pack_padded_sequence")(lambda *args: torch.ops.aten._pack_padded_sequence(*args)[0])
