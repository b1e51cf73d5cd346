"""Samples of _weight_norm_interface, _weight_norm_interface_backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import uneven


@samples_for("aten::_weight_norm_interface")
def weight_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    v, g = (random(3, 4, dtype=dtype, device=device, seed=k) for k in (0, 1))
    yield Sample(v, g[:, :1].contiguous(), 0)
    yield Sample(v, g[:1], 1)
    yield Sample(v.reshape(2, 3, 2), g[0, :2].reshape(2, 1, 1), 0)


@samples_for("aten::_weight_norm_interface_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for v, g, dim in (s.args for s in weight_norm(dtype, device)):
        norms = torch.ops.aten._weight_norm_interface(v, g, dim)[1]
        yield Sample(random(*v.shape, dtype=dtype, device=device, seed=2), v, g, norms, dim)


@probe_for("aten::_weight_norm_interface")
def weight_norm_probe(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """The differentiable output, of contiguous tensors: PyTorch's kernel reads others as if they were contiguous."""
    return torch.ops.aten._weight_norm_interface(v.contiguous(), g.contiguous(), dim)[0]


@probe_for("aten::_weight_norm_interface_backward")
def backward_probe(grad_w: Tensor, v: Tensor, g: Tensor, _: Tensor, dim: int) -> Any:
    """The backward with the norms of its own input, whatever norms it is given: it has no derivative in them."""
    grad_w, v, g = grad_w.contiguous(), v.contiguous(), g.contiguous()
    norms = torch.norm_except_dim(v, 2, dim)
    return uneven(*torch.ops.aten._weight_norm_interface_backward(grad_w, v, g, norms, dim))
