"""Probes of operators of neural networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def first_of(operator: str, overload: str = "default") -> Callable[..., Tensor]:
    """The first output of the operator, the only one that is differentiable."""

    def probe(*args: object, **kwargs: object) -> Tensor:
        return getattr(getattr(torch.ops.aten, operator), overload)(*args, **kwargs)[0]

    return probe


def uneven(*found: Tensor) -> list[Tensor]:
    """The results times different numbers: at equal cotangents the derivatives of a backward are zero to rounding."""
    return [f * torch.linspace(1, 2, f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape) for f in found]


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def untracked(x: Tensor) -> Tensor:
    """x without a tangent, not even one of zero, for operators of PyTorch that raise for any: integers have none."""
    return x.view(_BITS[x.dtype.itemsize]).view(x.dtype)
