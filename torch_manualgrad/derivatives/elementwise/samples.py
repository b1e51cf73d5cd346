"""Samples for operators that do not broadcast, or whose tensors are not first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample


def alike(*layout: Any, spread: float = 1.0, complex_too: bool = False) -> Callable[..., Iterable[Sample]]:
    """Random tensors of one shape, matrices and numbers.

    Args:
        layout: the positional arguments; the class ``Tensor`` stands for a tensor.
        spread: the standard deviation.
        complex_too: whether the operator takes complex tensors.

    Returns:
        What `rule` takes as ``samples``.
    """

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and not complex_too:
            return
        wide = torch.complex128 if dtype.is_complex else torch.float64
        for shape in ((3, 4), ()):
            generator = torch.Generator().manual_seed(len(shape))
            yield Sample(
                *[
                    (spread * torch.randn(shape, dtype=wide, generator=generator)).to(device, dtype)
                    if a is Tensor
                    else a
                    for a in layout
                ]
            )

    return samples


def both(*several: Callable[..., Iterable[Sample]]) -> Callable[..., Iterable[Sample]]:
    """The samples of one after the other."""
    return lambda dtype, device: [s for samples in several for s in samples(dtype, device)]
