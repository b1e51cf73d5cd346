"""Probes of operators whose result is sparse: checks compare dense tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def times_identity(op: Any) -> Callable[..., Tensor]:
    """The operator, with its sparse result made dense by a product with the identity matrix."""

    def probe(*args: Any, **kwargs: Any) -> Tensor:
        found = op(*args, **kwargs)
        return found @ torch.eye(found.shape[1], dtype=found.dtype, device=found.device)

    return probe


def made_dense(op: Any) -> Callable[..., Tensor]:
    """The operator, with its result made dense and contiguous: PyTorch's fake kernels give it other strides."""
    return lambda *args, **kwargs: op(*args, **kwargs).to_dense(masked_grad=False).contiguous()
