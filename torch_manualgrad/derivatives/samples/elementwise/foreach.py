"""Samples of operators on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, samples_for

from ..drawing import both


def _from(f: Callable[[Tensor, Tensor], tuple[Any, ...]], real_only: bool = False) -> Sampler:
    """Samples made of two lists of matrices with positive entries; one matrix has a single column."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and real_only:
            return
        x = torch.linspace(0.4, 2.3, 6, dtype=torch.float64, device=device).reshape(2, 3)
        y = x.flip(1) + 0.3
        if dtype.is_complex:
            x, y = torch.complex(x, y / 3), torch.complex(y, x / 4)
        yield Sample(*f([x.to(dtype), x[:, 1].to(dtype)], [y.to(dtype), y[1, 1].to(dtype)]))

    return samples


samples_for("aten::_foreach_div.List", "aten::_foreach_pow.List")(_from(lambda x, y: (x, y)))
samples_for("aten::_foreach_pow.ScalarList")(_from(lambda x, y: (x, [2.5, 3])))
samples_for("aten::_foreach_pow.ScalarAndTensor")(_from(lambda x, y: (2.5, x)))
samples_for("aten::_foreach_norm.Scalar")(both(_from(lambda x, y: (x, 3)), _from(lambda x, y: (x,))))
samples_for("aten::_foreach_mm")(_from(lambda x, y: ([x[0], x[0].mT], [y[0].mT, y[0]])))
samples_for("aten::_foreach_maximum.Scalar", "aten::_foreach_minimum.Scalar")(
    _from(lambda x, y: (x, 1.3), real_only=True)
)
samples_for("aten::_foreach_maximum.ScalarList", "aten::_foreach_minimum.ScalarList")(
    _from(lambda x, y: (x, [1.3, 0.9]), real_only=True)
)
