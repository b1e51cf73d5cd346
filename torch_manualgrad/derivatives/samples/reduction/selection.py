"""Samples of operators that return entries and their indices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_manualgrad.core.rule import Sample, Sampler, samples_for

from ..drawing import spread


def _samples(*arguments: dict[str, Any], empty: dict[str, Any] | None = None) -> Sampler:
    """A matrix with each of the arguments, a number with the first of them, and an empty matrix."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = spread((3, 4), dtype, device)
        for position, given in enumerate(arguments):
            yield Sample(x.mT if position % 2 else x, **given)
        first = {name: value for name, value in arguments[0].items() if name not in ("dim", "k")}
        if "k" in arguments[0]:
            first["k"] = 1
        yield Sample(spread((), dtype, device), **first, dim=-1)
        if empty is not None:
            yield Sample(spread((0, 3), dtype, device), **empty)

    return samples


samples_for("aten::max.dim", "aten::min.dim", "aten::median.dim", "aten::nanmedian.dim", "aten::mode")(
    _samples({"dim": 0}, {"dim": -1, "keepdim": True}, empty={"dim": 1})
)
samples_for("aten::kthvalue")(_samples({"k": 2, "dim": 0}, {"k": 3, "keepdim": True}, empty={"k": 1, "dim": 1}))
samples_for("aten::sort")(_samples({"dim": 0}, {"descending": True}, empty={"dim": 0}))
samples_for("aten::sort.stable")(
    _samples({"stable": True, "dim": 0}, {"stable": None, "descending": True}, empty={"stable": False, "dim": 0})
)
samples_for("aten::topk")(_samples({"k": 2, "dim": 0}, {"k": 3, "largest": False}, empty={"k": 2, "dim": 1}))
samples_for("aten::cummax", "aten::cummin")(_samples({"dim": 0}, {"dim": -1}, empty={"dim": 0}))
