"""What every function of this package asks of its matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def matrix(A: Tensor, name: str, *, square: bool = False) -> Tensor:
    """A, in float32 at least if autocast is on.

    Raises:
        ValueError: A has less than two dims, or is not square where it should be. TypeError: not a tensor, or neither
        floating point nor complex.
    """
    if not isinstance(A, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(A).__name__}")
    if A.dim() < 2:
        raise ValueError(f"{name}: expected a matrix or a batch of matrices, got shape {list(A.shape)}")
    if square and A.shape[-1] != A.shape[-2]:
        raise ValueError(f"{name}: expected square matrices, got shape {list(A.shape)}")
    if not (A.is_floating_point() or A.is_complex()):
        raise TypeError(f"{name}: expected a floating point or complex dtype, got {A.dtype}")
    if A.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(A.device.type):
        return A.float()
    return A
