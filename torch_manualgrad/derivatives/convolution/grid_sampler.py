"""grid_sampler_2d, grid_sampler_3d and their backward operators. The mathematics is in `sampler`.

The vjp of the first order is PyTorch's fused operator; every other derivative is made of PyTorch's operators. Plain calls in
reverse mode stay with PyTorch, which lacks forward mode. Half precision is computed in single.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

from .sampler import Directions, in_grid, in_image, in_samples

__all__ = [
    "grid_sampler_2d_backward",
    "grid_sampler_2d_double_backward",
    "grid_sampler_3d_backward",
    "grid_sampler_3d_double_backward",
    "grid_sampler_backward_jvp",
    "grid_sampler_jvp",
]

_aten = torch.ops.aten


def _wide(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x


def _directions(*tensors: Tensor | None) -> Directions:
    return Directions(*map(_wide, tensors))


def _parts(
    d: Directions, modes: tuple[int, int, bool], like: Sequence[Tensor], mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Those in g, x and the grid, in the dtypes of these; what is not wanted is empty."""
    found = (in_samples, in_image, in_grid)[-len(like) :]
    return tuple(f(d, modes).to(x.dtype) if yes else x.new_zeros(0) for f, x, yes in zip(found, like, mask))


@formula(kernel=("default",))
def grid_sampler_2d_backward(
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Cotangents of image and grid, given that of the samples.

    Args:
        grad_output: g, (N, C, h, w).
        input: x, the image, (N, C, H, W), real.
        grid: coordinates from -1 to 1, that along W first, (N, h, w, 2).
        interpolation_mode: 0 bilinear, 1 nearest, 2 bicubic.
        padding_mode: of what is outside of the image: 0 zeros, 1 the border, 2 a reflection.
        align_corners: whether -1 and 1 are the centers of the outermost pixels, or their outer edges.
        output_mask: which of the two are wanted; the other comes back empty.

    Returns:
        The shapes of ``input`` and ``grid``; contiguous.

    Note:
        Where not differentiable: bilinear at the centers of pixels, where the derivative is that on the right, and where
        the padding moves a point, where it is 0. For nearest the gradient of the grid is 0.

    References:
        ATen grid_sampler_2d_backward.
    """
    d = _directions(None, input, grid, grad_output, None, None)
    found = _parts(d, (interpolation_mode, padding_mode, align_corners), (input, grid), output_mask)
    return tuple(f.contiguous() for f in found)  # type: ignore[return-value]


@formula(kernel=("default",))
def grid_sampler_3d_backward(
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Cotangents of image and grid, given that of the samples.

    Args:
        grad_output: g, (N, C, d, h, w).
        padding_mode, align_corners, output_mask: see `grid_sampler_2d_backward`.
        input: x, the image, (N, C, D, H, W), real.
        grid: coordinates from -1 to 1, that along W first, (N, d, h, w, 3).
        interpolation_mode: 0 bilinear, 1 nearest.

    Returns:
        The shapes of ``input`` and ``grid``; contiguous.

    Note:
        Where not differentiable: see `grid_sampler_2d_backward`.

    References:
        ATen grid_sampler_3d_backward.
    """
    d = _directions(None, input, grid, grad_output, None, None)
    found = _parts(d, (interpolation_mode, padding_mode, align_corners), (input, grid), output_mask)
    return tuple(f.contiguous() for f in found)  # type: ignore[return-value]


def _fused(backward: Any) -> Callable[..., tuple[Tensor, ...]]:
    """PyTorch's operator, with empty tensors for what is not wanted."""

    def kernel(
        grad_output: Tensor,
        input: Tensor,
        grid: Tensor,
        interpolation_mode: int,
        padding_mode: int,
        align_corners: bool,
        output_mask: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        if grid.is_cpu and interpolation_mode == 0 and padding_mode != 0:
            grad_output, grid = _without_lost_points(grad_output, grid, padding_mode)
        found = backward(
            grad_output, input, grid, interpolation_mode, padding_mode, align_corners, [bool(m) for m in output_mask]
        )
        return tuple(f.contiguous() if yes else input.new_zeros(0) for f, yes in zip(found, output_mask))

    return kernel


def _without_lost_points(grad_output: Tensor, grid: Tensor, padding_mode: int) -> tuple[Tensor, Tensor]:
    """Points that padding moves to nan get no cotangent: there PyTorch's kernel for the CPU leaves its memory."""
    lost = (grid.isnan() if padding_mode == 1 else ~grid.isfinite()).any(-1)
    if not lost.any():
        return grad_output, grid
    return grad_output.masked_fill(lost.unsqueeze(1), 0), grid.masked_fill(lost.unsqueeze(-1), 0)


grid_sampler_2d_backward.impl("default")(_fused(_aten.grid_sampler_2d_backward))
grid_sampler_3d_backward.impl("default")(_fused(_aten.grid_sampler_3d_backward))


@formula
def grid_sampler_2d_double_backward(
    ggI: Tensor | None,
    ggGrid: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of grad_output, image and grid of the backward, given those of its two results.

    Args:
        ggI, ggGrid: cotangents of the gradients of image and grid; None for zero.
        grad_output, input, grid, interpolation_mode, padding_mode, align_corners: see `grid_sampler_2d_backward`.
        output_mask: which of the three are wanted; the others come back empty.

    Returns:
        The shapes of ``grad_output``, ``input`` and ``grid``.

    Note:
        Where not differentiable: see `grid_sampler_2d_backward`.

    References:
        ATen grid_sampler_2d_double_backward.
    """
    d = _directions(grad_output, input, grid, None, ggI, ggGrid)
    modes = (interpolation_mode, padding_mode, align_corners)
    return _parts(d, modes, (grad_output, input, grid), output_mask)  # type: ignore[return-value]


@formula
def grid_sampler_3d_double_backward(
    ggI: Tensor | None,
    ggGrid: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of grad_output, image and grid of the backward, given those of its two results.

    Args:
        ggI, ggGrid: cotangents of the gradients of image and grid; None for zero.
        grad_output, input, grid, interpolation_mode, padding_mode, align_corners: see `grid_sampler_3d_backward`.
        output_mask: which of the three are wanted; the others come back empty.

    Returns:
        The shapes of ``grad_output``, ``input`` and ``grid``.

    Note:
        Where not differentiable: see `grid_sampler_2d_backward`.

    References:
        ATen grid_sampler_3d_double_backward.
    """
    modes = (interpolation_mode, padding_mode, align_corners)
    return grid_sampler_2d_double_backward(ggI, ggGrid, grad_output, input, grid, *modes, output_mask)


@formula
def grid_sampler_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    grid_p: Tensor,
    grid_t: Tensor | None,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Tensor:
    """Tangent of the samples: s(dx) + sum_k dc_k ds/dc_k.

    Args:
        input_p: x, (N, C, H, W) or (N, C, D, H, W), real.
        grid_p: (N, *, 2) or (N, *, 3).
        input_t, grid_t: tangents; None for zero.
        interpolation_mode, padding_mode, align_corners: see `grid_sampler_2d_backward`.

    Returns:
        (N, C, *).

    Note:
        Where not differentiable: see `grid_sampler_2d_backward`.

    References:
        ATen grid_sampler_2d, which has no forward mode before torch 2.15.
    """
    d = _directions(None, input_p, grid_p, None, input_t, grid_t)
    return in_samples(d, (interpolation_mode, padding_mode, align_corners)).to(input_p.dtype)


@formula
def grid_sampler_backward_jvp(
    grad_output_p: Tensor,
    grad_output_t: Tensor | None,
    input_p: Tensor,
    input_t: Tensor | None,
    grid_p: Tensor,
    grid_t: Tensor | None,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Tangents of the gradients of image and grid.

    Args:
        grad_output_p, input_p, grid_p: g, x and the grid, in two or three dims.
        grad_output_t, input_t, grid_t: tangents; None for zero.
        interpolation_mode, padding_mode, align_corners: see `grid_sampler_2d_backward`.
        output_mask: which of the two are wanted; the other comes back empty.

    Returns:
        The shapes of ``input_p`` and ``grid_p``.

    Note:
        Where not differentiable: see `grid_sampler_2d_backward`.

    References:
        The transpose of ATen grid_sampler_2d_double_backward.
    """
    d = _directions(grad_output_p, input_p, grid_p, grad_output_t, input_t, grid_t)
    modes = (interpolation_mode, padding_mode, align_corners)
    return _parts(d, modes, (input_p, grid_p), output_mask)  # type: ignore[return-value]
