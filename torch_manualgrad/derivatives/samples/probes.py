"""Probes: operators called in a way that PyTorch's own checks and batching rules can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["as_function", "laid_out"]


def as_function(operator: Any) -> Callable[..., Any]:
    """The operator as a function: PyTorch's opcheck, which fails at symbolic sizes, is then not run."""
    return lambda *args: operator(*args)


def laid_out(operator: Any) -> Callable[..., Any]:
    """The operator on contiguous tensors, as it misreads or refuses others, without results that are None.

    The tensors are contiguous even if vmap batches the last dim.
    """

    def contiguous(x: Any) -> Any:
        return x.unsqueeze(0).contiguous().squeeze(0) if isinstance(x, Tensor) else x

    def probe(*args: Any) -> Any:
        found = operator(*map(contiguous, args))
        return found if isinstance(found, Tensor) else [g for g in found if g is not None]

    return probe
