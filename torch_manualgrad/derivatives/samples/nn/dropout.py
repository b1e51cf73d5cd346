"""Samples of native_dropout, _fused_dropout, rrelu_with_noise and _masked_softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import first_of


@samples_for("aten::native_dropout")
def dropout(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Calls that draw no random numbers."""
    if not dtype.is_complex:
        x = random(2, 3, dtype=dtype, device=device)
        yield from (Sample(x, 0.4, False), Sample(x, 0.0, True), Sample(x, 1.0, True))


@samples_for("aten::native_dropout_backward")
def dropout_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    g = random(2, 3, dtype=dtype, device=device)
    yield Sample(g, g.abs() > 0.6, 2.5)


@samples_for("aten::_fused_dropout")
def fused(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(random(2, 3, dtype=dtype, device="cuda"), 1.0)


@samples_for("aten::rrelu_with_noise_functional", "aten::rrelu_with_noise")
def rrelu(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Calls that draw no random slopes: both ends of their interval are the same."""
    if dtype.is_complex:
        return
    x = random(2, 3, dtype=dtype, device=device)
    yield Sample(x, torch.zeros_like(x), 0.1, 0.3, False)
    yield Sample(x, torch.zeros_like(x), 0.2, 0.2, True)


def _rrelu_probe(operator_name: str) -> Callable[..., Tensor]:
    """The first output, for contiguous tensors: PyTorch's kernel writes the noise as if it were contiguous."""

    def probe(self: Tensor, noise: Tensor, *rest: Any) -> Tensor:
        self = self.contiguous()
        found = getattr(torch.ops.aten, operator_name)(self, torch.zeros_like(self), *rest)
        result: Tensor = found if isinstance(found, Tensor) else found[0]
        return result

    return probe


@samples_for("aten::rrelu_with_noise_backward")
def rrelu_backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    g, x = (random(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
    noise = torch.where(x > 0, 1, 0.2 + 0.1 * g.sigmoid()).to(dtype)
    for training in (False, True):
        yield Sample(g, x, noise, 0.1, 0.3, training, False)


@samples_for("aten::_masked_softmax")
def masked_softmax(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = random(2, 1, 3, 3, dtype=dtype, device=device)
    mask = torch.eye(3, dtype=torch.bool, device=device)
    yield Sample(x, mask.flip(0).expand(x.shape).clone(), None, 2)
    yield Sample(x, mask, 3, 0)
    yield Sample(x, mask[:2], 3, 1)
    yield Sample(x[0, 0], mask, 0, 2)


@probe_for("aten::_masked_softmax")
def masked_softmax_probe(self: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    """PyTorch's kernel reads the mask as if both were contiguous."""
    return torch.ops.aten._masked_softmax(self.contiguous(), mask.contiguous(), *rest)


probe_for("aten::native_dropout")(first_of("native_dropout"))
probe_for("aten::_fused_dropout")(first_of("_fused_dropout"))
probe_for("aten::rrelu_with_noise_functional")(_rrelu_probe("rrelu_with_noise_functional"))
probe_for("aten::rrelu_with_noise")(_rrelu_probe("rrelu_with_noise"))
