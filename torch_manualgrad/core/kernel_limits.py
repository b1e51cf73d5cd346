"""Up to which order n the compiled kernels take matrices. The numbers stand in ``csrc/linalg/limits.h``."""

from __future__ import annotations

import functools

import torch

from torch_manualgrad.core import kernels

__all__ = ["kernel_limit"]


@functools.cache
def kernel_limit(name: str) -> int:
    """The limit of this name in ``csrc/linalg/limits.h``, as the library says; 0 where there is none.

    Args:
        name: for instance ``"lane_order"``.

    Raises:
        KeyError: the library knows no such limit.
    """
    if not any(library.loaded for library in kernels.load() if library.device == "cpu"):
        return 0
    found = torch.ops.manualgrad.kernel_limit(name)
    if found == 0:
        raise KeyError(f"csrc/linalg/limits.h has no {name!r}")
    return found
