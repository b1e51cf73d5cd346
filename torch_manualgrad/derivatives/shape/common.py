"""What the rules of several index operators use: samples, and tensors brought to a shape or a dtype."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample

__all__ = ["corner", "in_corner", "index", "of_dtype", "random", "samples"]


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype; the real part for a real one."""
    return (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def corner(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The entries of x whose indices are below these sizes."""
    return x if x.shape == tuple(sizes) else x[tuple(slice(n) for n in sizes)]


def in_corner(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Zeros of these sizes with x where their indices are lowest; one entry may come with a dim too many or too few."""
    if x.shape == tuple(sizes):
        return x
    if x.numel() == 0:
        return x.new_zeros(sizes)
    if x.dim() != len(sizes):
        x = x.reshape([1] * len(sizes))
    return torch.constant_pad_nd(x, [p for d in reversed(range(x.dim())) for p in (0, sizes[d] - x.shape[d])])


# -- samples ----------------------------------------------------------------------------------------------------------


def random(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Numbers from a seed, no two of them near each other or zero."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel()
    points = (torch.randperm(n, generator=generator).double() + 1 + seed % 7 / 10) * (2.0 / max(n, 1)) - 0.9
    if dtype.is_complex:
        points = torch.complex(points, torch.rand(n, dtype=torch.float64, generator=generator) + 0.2)
    return points.reshape(shape).to(device, dtype)


def index(values: Any, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of integers, or of booleans."""
    return torch.tensor(values, device=device, dtype=torch.int64 if values == [] else None)


def _drawing(dtype: torch.dtype, device: torch.device | str) -> Callable[..., Tensor]:
    """``random`` with another seed at each call."""
    seeds = itertools.count()
    return lambda *shape: random(*shape, dtype=dtype, device=device, seed=next(seeds))


def samples(
    *calls: Callable[..., Sequence[Any]], real_only: bool = False
) -> Callable[[torch.dtype, torch.device | str], Iterable[Sample]]:
    """Samples from functions ``(draw, index) -> arguments``, whose last may be a dictionary of keywords.

    ``draw(*shape)`` gives random numbers, others at each call; ``index`` a tensor of integers or booleans.
    """

    def made(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and real_only:
            return
        for call in calls:
            arguments = list(call(_drawing(dtype, device), functools.partial(index, device=device)))
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            yield Sample(*arguments, **keywords)

    return made
