"""Samples of the cells of LSTM and GRU, which are operators of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from torch_manualgrad.core.rule import Sample, samples_for


def _samples(parts: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        generator = torch.Generator().manual_seed(0)
        sizes = ((2, parts * 3), (2, parts * 3), (2, 3), (parts * 3,), (parts * 3,))
        given = [torch.randn(*s, dtype=dtype, generator=generator).to("cuda") for s in sizes]
        yield Sample(*given)
        yield Sample(*given[:3])

    return samples


samples_for("aten::_thnn_fused_lstm_cell")(_samples(4))
samples_for("aten::_thnn_fused_gru_cell")(_samples(3))
