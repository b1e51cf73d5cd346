"""Samples of grid sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_manualgrad.core.rule import (
    Sample,
    Sampler,
    probe_for,
    reached,
    samples_for,
)

from ..drawing import random


def _inputs(
    dims: int, *modes: tuple[int, int, bool], dtype: torch.dtype | None = None
) -> Callable[..., Iterable[tuple[Any, ...]]]:
    """Image, grid and modes; some points outside of the image, and none next to the edge of a pixel."""

    def inputs(given: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
        if given.is_complex:
            return
        for interpolation, padding, align_corners in modes:
            # as wide as the batches of the check of vmap: PyTorch's batching rule takes this for the size of the batch
            sizes = (4, 3) if dims == 2 else (2, 2, 3)
            image = random(1, 2, *sizes, dtype=dtype or given, device=device)
            points = [[-0.53, 0.37], [0.28, -0.81], [1.39, -0.17], [-1.22, 1.45]]
            coordinates = torch.tensor(points, dtype=dtype or given, device=device)
            if dims == 3:
                coordinates = torch.cat([coordinates, 0.7 * coordinates.flip(0)[:, :1] + 0.04], 1)
            grid = coordinates.reshape(1, *[1] * (dims - 1), 4, dims)
            yield image, grid, interpolation, padding, align_corners

    return inputs


def _backward(inputs: Callable[..., Any], *rest: Any) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for image, grid, *modes in inputs(dtype, device):
            shape = (*image.shape[:2], *grid.shape[1:-1])
            yield Sample(random(*shape, dtype=image.dtype, device=device, seed=3), image, grid, *modes, *rest)

    return samples


def _forward(inputs: Callable[..., Any]) -> Sampler:
    return lambda dtype, device: [Sample(*given) for given in inputs(dtype, device)]


_IN_2D = _inputs(2, (0, 0, False), (0, 2, True), (1, 1, False), (2, 0, False), (2, 2, False))
_IN_3D = _inputs(3, (0, 0, True), (0, 1, False), (1, 2, False))
_IN_SINGLE = _inputs(2, (0, 0, False), (1, 1, True), dtype=torch.float32)
_FALLBACK = "_grid_sampler_2d_cpu_fallback"

for _name, _given in (("grid_sampler_2d", _IN_2D), ("grid_sampler_3d", _IN_3D)):
    samples_for(f"aten::{_name}")(_forward(_given))
    samples_for(f"aten::{_name}_backward")(_backward(_given, [True, True]))


samples_for(f"aten::{_FALLBACK}")(_forward(_IN_SINGLE))


@probe_for(f"aten::{_FALLBACK}")
def fallback(*args: Any) -> Any:
    """In double precision, which the fallback does not take, the operator itself."""
    return getattr(torch.ops.aten, "grid_sampler_2d" if args[0].dtype == torch.float64 else _FALLBACK)(*args)


if reached("2.12"):  # composite before
    samples_for(f"aten::{_FALLBACK}_backward")(_backward(_IN_SINGLE))

    @probe_for(f"aten::{_FALLBACK}_backward")
    def fallback_backward(*args: Any) -> Any:
        if args[0].dtype == torch.float64:
            return torch.ops.aten.grid_sampler_2d_backward(*args, [True, True])
        return getattr(torch.ops.aten, f"{_FALLBACK}_backward")(*args)
