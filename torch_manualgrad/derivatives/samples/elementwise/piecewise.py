"""Samples of activations made of pieces."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import alike, both

aten = torch.ops.aten


@samples_for("aten::_prelu_kernel_backward")
def prelu_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for s in alike(Tensor, Tensor, Tensor)(dtype, device):
        grad, x, weight = s.args
        yield from (s, Sample(grad, x, weight[:1])) if x.dim() else (s,)


samples_for("aten::threshold_backward", "aten::hardshrink_backward", "aten::softshrink_backward")(
    alike(Tensor, Tensor, 0.5)
)
samples_for("aten::leaky_relu_backward")(alike(Tensor, Tensor, 0.25, False))
samples_for("aten::elu_backward")(
    both(alike(Tensor, 1.5, 1.2, 0.7, False, Tensor), alike(Tensor, 1.5, 1.2, 0.7, True, Tensor, spread=0.5))
)
samples_for("aten::hardswish_backward")(alike(Tensor, Tensor, spread=2.0))
samples_for("aten::hardtanh_backward")(alike(Tensor, Tensor, -1.1, 1.3))
samples_for("aten::_prelu_kernel")(alike(Tensor, Tensor))
# functions, as opcheck finds that the operators themselves do not take symbolic sizes
probe_for("aten::hardshrink_backward")(lambda grad, self, lambd: aten.hardshrink_backward(grad, self, lambd))
probe_for("aten::softshrink_backward")(lambda grad, self, lambd: aten.softshrink_backward(grad, self, lambd))
