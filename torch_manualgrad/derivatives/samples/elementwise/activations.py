"""Samples of smooth activations and their backward operators."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import alike, both

aten = torch.ops.aten


@samples_for("aten::log_sigmoid_backward")
def log_sigmoid_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for grad, x in (s.args for s in alike(Tensor, Tensor)(dtype, device)):
        yield Sample(grad, x, (-x.abs()).exp())


samples_for("aten::softplus_backward")(both(alike(Tensor, Tensor, 1.0, 20.0), alike(Tensor, Tensor, 2.0, 1.0)))
samples_for("aten::gelu_backward")(
    lambda dtype, device: [
        Sample(*s.args, approximate=a) for a in ("none", "tanh") for s in alike(Tensor, Tensor)(dtype, device)
    ]
)


samples_for("aten::log_sigmoid_forward")(alike(Tensor))
samples_for("aten::sigmoid_backward", "aten::tanh_backward")(alike(Tensor, Tensor, complex_too=True))
probe_for("aten::log_sigmoid_forward")(lambda self: torch.ops.aten.log_sigmoid_forward(self)[0])
probe_for("aten::log_sigmoid_backward")(
    lambda grad_output, self, buffer: torch.ops.aten.log_sigmoid_backward(
        grad_output, self, (-self.abs()).exp().detach()
    )
)
