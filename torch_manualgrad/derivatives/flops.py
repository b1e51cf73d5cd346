"""Flops of formulas with kernels for ``torch.utils.flop_counter``, which counts matrix products and not kernels.

A kernel is counted as the matrix products in the body of its formula, which runs on tensors without data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from torch_manualgrad.core.rule import Formula, ops


def _without_data(x: Any) -> Any:
    return x.detach().to("meta") if isinstance(x, Tensor) else x


def _register(formula: Formula) -> None:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            formula.reference(*map(_without_data, args), **{name: _without_data(x) for name, x in kwargs.items()})
        return int(counter.get_total_flops())

    register_flop_formula(getattr(torch.ops.manualgrad, formula.__name__), get_raw=True)(flops)


# Not counted, as in PyTorch: kernels that solve with the forward's factors, while their bodies decompose again; and, in
# releases that do not count it, PyTorch's own attention.
_UNCOUNTED = {"linalg_det_backward", "slogdet_backward", "adjugate_again"}
if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward not in flop_registry:
    _UNCOUNTED.add("attention_backward")

for _formula in ops.entered():
    if _formula.__name__ in _UNCOUNTED:
        continue
    if _formula.overloads or not _formula.transparent:
        _register(_formula)
