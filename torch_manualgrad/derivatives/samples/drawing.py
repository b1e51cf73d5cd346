"""Random tensors for samples: the same on every device and in every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["in_one_precision", "leaf", "random", "random_conditioned", "random_definite"]


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def random_conditioned(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, least: float = 1.0
) -> Tensor:
    """Random matrices with the well separated singular values least, least + 0.7, ...: off every kink."""
    X = random(*shape, dtype=dtype, seed=seed)
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    S = least + 0.7 * torch.arange(S.shape[-1] - 1, -1, -1, dtype=S.dtype).expand(S.shape)
    return ((U * S.unsqueeze(-2)) @ Vh).to(device)


def random_definite(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Hermitian positive definite matrices with well separated eigenvalues."""
    X = random_conditioned(*shape, dtype=dtype, seed=seed)
    return (X @ X.mH).to(device)


def leaf(x: Tensor) -> Tensor:
    """An input that is differentiated, in samples with others that are not."""
    return x.requires_grad_()


def _floating(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def in_one_precision(f: Callable[..., Any]) -> Callable[..., Any]:
    """A probe: the function, with its keyword arguments in the dtype of its first tensor."""

    def probe(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        same = {k: first.dtype if isinstance(v, torch.dtype) else _floating(v, first.dtype) for k, v in kwargs.items()}
        return f(first, *args, **same)

    return probe
