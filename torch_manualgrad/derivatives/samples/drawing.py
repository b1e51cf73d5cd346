"""Random tensors for samples: the same on every device and in every precision."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["random"]


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
