"""What the rules of convolution, pooling and sampling share: samples, and a zero gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["random", "total", "zero_of"]


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Normal entries, the same on every device and in every precision."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(*shape, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that are not None; None if all are."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


def zero_of(grad: Tensor, self_sizes: Sequence[int]) -> Tensor:
    """The gradient of an input of which the operator reads the sizes."""
    return grad.new_zeros(self_sizes)
