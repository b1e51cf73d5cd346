"""What the rules of convolution, pooling and sampling share: samples, and a zero gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_function", "laid_out", "random", "total", "zero_of"]


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


def as_function(operator: Any) -> Callable[..., Any]:
    """A probe: the operator, for which PyTorch's own opcheck is not run, as it fails at symbolic sizes."""
    return lambda *args: operator(*args)


def laid_out(operator: Any) -> Callable[..., Any]:
    """A probe: the operator on contiguous tensors, where PyTorch's reads others wrongly or refuses them.

    Also where vmap batches the last dim; and without results that are None.
    """

    def contiguous(x: Any) -> Any:
        return x.unsqueeze(0).contiguous().squeeze(0) if isinstance(x, Tensor) else x

    def probe(*args: Any) -> Any:
        found = operator(*map(contiguous, args))
        return found if isinstance(found, Tensor) else [g for g in found if g is not None]

    return probe
