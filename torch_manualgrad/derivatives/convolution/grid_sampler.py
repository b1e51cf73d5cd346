"""Sampling of an image at the points of a grid: grid_sampler_2d, grid_sampler_3d and their backward operators.

A point of the grid has one coordinate from $-1$ to 1 for each dim of the image, the last dim first. Each coordinate $c$
becomes a place $u(c)$ in pixels, which is affine in $c$ where it is differentiable, and the sample is the sum of the
pixels around $u$ times a product of weights, one for each dim:

    $s = sum_ij p_i(u) q_j(v) x_ij$,

with $p$ a piecewise polynomial in $u$, of degree 0, 1 and 3 for nearest, bilinear and bicubic. So $<g, s>$ is linear in
$g$ and in the image $x$, and its derivatives in the grid are those of the weights. The backward operator is the
gradient of $<g, s>$ in $x$ and the grid. The derivatives of all operators are parts of the product of the Hessian of
$<g, s>$ with directions $dg$, $dx$, $dc$:

    in $g$     $s(dx) + sum_k dc_k ds/dc_k$
    in $x$     the transpose of $s$ applied to $dg$, and of $sum_k dc_k ds/dc_k$ applied to $g$
    in $c_k$   $<dg, ds/dc_k> + <g, ds(dx)/dc_k> + sum_l dc_l <g, d^2 s/dc_k dc_l>$.

The vjp of the first order is PyTorch's fused operator; every other derivative is made of PyTorch's operators. Plain calls in
reverse mode are left to PyTorch, which lacks forward mode. Half precision is computed in single.

Args:
    grad_output: $g$, (N, C, h, w).
    input: $x$, the image, (N, C, H, W), real.
    grid: coordinates from $-1$ to 1, that along $W$ first, (N, h, w, 2).
    interpolation_mode: 0 bilinear, 1 nearest, 2 bicubic.
    padding_mode: for points outside of the image: 0 zeros, 1 the border, 2 a reflection.
    align_corners: whether $-1$ and 1 are the centers of the outermost pixels, or their outer edges.
    output_mask: which of the two are wanted; the other is returned empty.
    ggI, ggGrid: cotangents of the gradients of image and grid; None for zero.

Note:
    Where not differentiable: bilinear at the centers of pixels, where the derivative is that from the right, and where the
    padding moves a point, where it is 0. For nearest, the gradient of the grid is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Formula, bound_to, formula, known_finite, reached, rule

from ..terms import total

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_LARGEST = 2.0**30  # places further away than this are outside
_A = -0.75  # the parameter of cubic convolution


# -- places and weights along one dim ---------------------------------------------------------------------------------


class _Dim(NamedTuple):
    """The pixels that are read along one dim of the image, (N, P, T): $P$ points, $T$ pixels around each.

    Attributes:
        pixels: their places, all of them inside of the image.
        weights: their weights, and the first and second derivatives of these in the coordinate.
    """

    pixels: Tensor
    weights: tuple[Tensor, Tensor, Tensor]


def _place(c: Tensor, size: int, align_corners: bool) -> tuple[Tensor, Any]:
    """The place in pixels of a coordinate, and its derivative."""
    slope = (size - 1) / 2 if align_corners else size / 2
    return (c + 1) * slope if align_corners else (c + 1) * slope - 0.5, slope


def _padded(u: Tensor, size: int, padding_mode: int, align_corners: bool) -> tuple[Tensor, Tensor]:
    """A place moved into the image, and the derivative of this move: 0 on the border, as in PyTorch."""
    slope = torch.ones_like(u)
    if padding_mode == _REFLECTION:
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        if align_corners and size == 1:
            return torch.zeros_like(u), torch.zeros_like(u)
        t = u - low
        below = t < 0
        t = torch.where(below, -t, t)
        flips = (t / span).floor()
        odd = (flips / 2).floor() * 2 != flips
        t = t - flips * span
        u = torch.where(odd, span - t, t) + low
        slope = torch.where(below ^ odd, -slope, slope)
    if padding_mode != _ZEROS:
        inside = (u > 0) & (u < size - 1)
        u = torch.where(inside, u, u.detach().clamp(0, size - 1))
        slope = torch.where(inside, slope, 0)
    return u, slope


def _polynomials(f: Tensor, mode: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the pixels around a place, a fraction $f$ after one of them; their derivatives."""
    one, zero = torch.ones_like(f), torch.zeros_like(f)
    if mode == _NEAREST:
        return one[..., None], zero[..., None], zero[..., None]
    if mode == _BILINEAR:
        return torch.stack([1 - f, f], -1), torch.stack([-one, one], -1), torch.stack([zero, zero], -1)

    def near(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Within one pixel."""
        return (
            ((_A + 2) * x - (_A + 3)) * x * x + 1,
            (3 * (_A + 2) * x - 2 * (_A + 3)) * x,
            6 * (_A + 2) * x - 2 * (_A + 3),
        )

    def far(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Between one and two pixels away."""
        return _A * (((x - 5) * x + 8) * x - 4), _A * ((3 * x - 10) * x + 8), _A * (6 * x - 10)

    found = [far(1 + f), near(f), near(1 - f), far(2 - f)]
    signs = (1, 1, -1, -1)  # of the derivative of the distance
    return (
        torch.stack([w for w, _, _ in found], -1),
        torch.stack([s * d for s, (_, d, _) in zip(signs, found)], -1),
        torch.stack([d for _, _, d in found], -1),
    )


def _dim(c: Tensor, size: int, mode: int, padding_mode: int, align_corners: bool) -> _Dim:
    """The pixels that are read along a dim of this size, at the coordinates $c$, (N, P)."""
    u, scale = _place(c, size, align_corners)
    cubic = mode == _BICUBIC
    slope = torch.ones_like(u)
    if not cubic:
        u, slope = _padded(u, size, padding_mode, align_corners)
    u = torch.where(u.abs() < _LARGEST, u, -100.0)
    start = (u.round() if mode == _NEAREST else u.floor()).detach()
    taps = torch.arange(*((-1, 3) if cubic else (0, 2) if mode == _BILINEAR else (0, 1)), device=c.device)
    at = start[..., None] + taps
    if cubic:  # each pixel is moved into the image separately
        at = _padded(at, size, padding_mode, align_corners)[0].detach()
    inside = (at >= 0) & (at <= size - 1)
    slope = slope * scale
    w, d, dd = _polynomials(u - start, mode)
    weights = (w, d * slope[..., None], dd * (slope * slope)[..., None])
    w, d, dd = (torch.where(inside, x, 0) for x in weights)
    return _Dim(at.clamp(0, size - 1).long(), (w, d, dd))


# -- points -----------------------------------------------------------------------------------------------------------


def _rows(x: Tensor, first: int) -> Tensor:
    """$x$ with all its dims from ``first`` on as one."""
    return x.reshape([*x.shape[:first], math.prod(x.shape[first:])])


def _spread(x: Tensor, k: int) -> Tensor:
    """(N, P, T) as (N, P, 1, ..., T), with $k$ ones."""
    return x.reshape([*x.shape[:2], *[1] * k, x.shape[2]])


def steps(grid: Tensor) -> Sequence[Tensor]:
    """Each of the coordinates, (N, P)."""
    return grid.reshape([grid.shape[0], math.prod(grid.shape[1:-1]), grid.shape[-1]]).unbind(-1)


class Sampler:
    """The pixels around each point of a grid, and their weights: the sample, its derivatives in the grid, and transposes.

    Args:
        grid: (N, *, d), with one coordinate for each of the $d$ dims of the image, the last dim first.
        sizes: the sizes of these dims.
        modes: interpolation_mode, padding_mode and align_corners of aten::grid_sampler.
    """

    def __init__(self, grid: Tensor, sizes: Sequence[int], modes: tuple[int, int, bool]) -> None:
        self.sizes, self.points = list(sizes), list(grid.shape[1:-1])
        coordinates = steps(grid)
        self.dims = [_dim(c, size, *modes) for c, size in zip(reversed(coordinates), sizes)]
        index = self.dims[0].pixels
        for k, dim in enumerate(self.dims[1:], 1):
            index = index[..., None] * sizes[k] + _spread(dim.pixels, k)
        self.index = index

    def _weights(self, *differentiated: int) -> list[Tensor]:
        """The weights of each dim, (N, 1, P, 1, ..., T), differentiated once in each of these coordinates."""
        orders = [0] * len(self.dims)
        for k in differentiated:
            orders[-1 - k] += 1
        return [_spread(dim.weights[order], k)[:, None] for k, (dim, order) in enumerate(zip(self.dims, orders))]

    def _flat_index(self, channels: int) -> Tensor:
        return _rows(self.index, 1)[:, None].expand(-1, channels, -1)

    def pixels(self, x: Tensor) -> Tensor:
        """The pixels around each point, (N, C, P, T, ..., T), of an image (N, C, *)."""
        found = _rows(x, 2).gather(2, self._flat_index(x.shape[1]))
        return found.reshape([*x.shape[:2], *self.index.shape[1:]])

    def sample(self, pixels: Tensor, *differentiated: int) -> Tensor:
        """The sample, or its derivative in some of the coordinates, (N, C, P)."""
        for w in reversed(self._weights(*differentiated)):
            pixels = (pixels * w).sum(-1)
        return pixels

    def transposed(self, g: Tensor, *differentiated: int) -> Tensor:
        """The transpose of `sample` of `pixels`: an image, given (N, C, P)."""
        for w in self._weights(*differentiated):
            g = g[..., None] * w
        flat = g.new_zeros([*g.shape[:2], math.prod(self.sizes)])
        found = flat.scatter_add(2, self._flat_index(g.shape[1]), _rows(g, 2))
        return found.reshape([*g.shape[:2], *self.sizes])


class Directions(NamedTuple):
    """The point at which $<g, s>$ is differentiated, and the directions; None is zero."""

    g: Tensor | None
    x: Tensor
    grid: Tensor
    dg: Tensor | None
    dx: Tensor | None
    dgrid: Tensor | None


def _moves(d: Directions, modes: tuple[int, int, bool]) -> Sequence[Tensor]:
    """The directions of the coordinates; none if nothing depends on them."""
    return () if d.dgrid is None or modes[0] == _NEAREST else steps(d.dgrid)


def in_samples(d: Directions, modes: tuple[int, int, bool]) -> Tensor:
    """The part in $g$ of the Hessian of $<g, s>$ times the directions: the tangent of the samples, (N, C, *)."""
    at = Sampler(d.grid, d.x.shape[2:], modes)
    pixels = at.pixels(d.x)
    found = None if d.dx is None else at.sample(at.pixels(d.dx))
    for k, dc in enumerate(_moves(d, modes)):
        found = total(found, at.sample(pixels, k) * dc[:, None])
    shape = [*d.x.shape[:2], *at.points]
    return d.x.new_zeros(shape) if found is None else found.reshape(shape)


def in_image(d: Directions, modes: tuple[int, int, bool]) -> Tensor:
    """The part in $x$: the shape of the image."""
    at = Sampler(d.grid, d.x.shape[2:], modes)
    found = None if d.dg is None else at.transposed(_rows(d.dg, 2))
    if d.g is not None:
        for k, dc in enumerate(_moves(d, modes)):
            found = total(found, at.transposed(_rows(d.g, 2) * dc[:, None], k))
    return torch.zeros_like(d.x) if found is None else found


def in_grid(d: Directions, modes: tuple[int, int, bool]) -> Tensor:
    """The part in the grid: its shape."""
    at = Sampler(d.grid, d.x.shape[2:], modes)
    g, dg = (None if t is None else _rows(t, 2) for t in (d.g, d.dg))
    pixels = at.pixels(d.x)
    moved = None if d.dx is None else at.pixels(d.dx)
    found = []
    for k in range(0 if modes[0] == _NEAREST else len(at.dims)):
        terms = [] if dg is None else [(dg * at.sample(pixels, k)).sum(1)]
        if g is not None:
            terms += [] if moved is None else [(g * at.sample(moved, k)).sum(1)]
            terms += [dc * (g * at.sample(pixels, k, j)).sum(1) for j, dc in enumerate(_moves(d, modes))]
        if terms:
            found.append(sum(terms[1:], terms[0]))
    return torch.stack(found, -1).reshape(d.grid.shape) if found else torch.zeros_like(d.grid)


# -- formulas ----------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def _wide(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x


def _directions(*tensors: Tensor | None) -> Directions:
    return Directions(*map(_wide, tensors))


def _parts(
    d: Directions, modes: tuple[int, int, bool], like: Sequence[Tensor], mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The parts in $g$, $x$ and the grid, in the dtypes of these; parts that are not wanted are empty."""
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

    Returns:
        The shapes of ``input`` and ``grid``; contiguous.
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
        grad_output: $g$, (N, C, d, h, w).
        input: $x$, the image, (N, C, D, H, W), real.
        grid: coordinates from $-1$ to 1, that along $W$ first, (N, d, h, w, 3).
        interpolation_mode: 0 bilinear, 1 nearest.

    Returns:
        The shapes of ``input`` and ``grid``; contiguous.
    """
    modes = (interpolation_mode, padding_mode, align_corners)
    return grid_sampler_2d_backward.reference(grad_output, input, grid, *modes, output_mask)


def _fused(backward: Any) -> Callable[..., tuple[Tensor, ...]]:
    """PyTorch's operator, with empty tensors for gradients that are not wanted."""

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
    """Points that padding moves to nan get no cotangent: there, PyTorch's CPU kernel accesses memory out of bounds."""
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
        output_mask: which of the three are wanted; the others are returned empty.

    Returns:
        The shapes of ``grad_output``, ``input`` and ``grid``.
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
        grad_output, input, grid, interpolation_mode: see `grid_sampler_3d_backward`.
        output_mask: which of the three are wanted; the others are returned empty.

    Returns:
        The shapes of ``grad_output``, ``input`` and ``grid``.
    """
    modes = (interpolation_mode, padding_mode, align_corners)
    return grid_sampler_2d_double_backward.reference(ggI, ggGrid, grad_output, input, grid, *modes, output_mask)


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
    """Tangent of the samples: $s(dx) + sum_k dc_k ds/dc_k$.

    Args:
        input_p: $x$, (N, C, H, W) or (N, C, D, H, W), real.
        grid_p: (N, *, 2) or (N, *, 3).
        input_t, grid_t: tangents; None for zero.

    Returns:
        (N, C, *).

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
        grad_output_p, input_p, grid_p: $g$, $x$ and the grid, in two or three dims.
        grad_output_t, input_t, grid_t: tangents; None for zero.

    Returns:
        The shapes of ``input_p`` and ``grid_p``.

    References:
        The transpose of ATen grid_sampler_2d_double_backward.
    """
    d = _directions(grad_output_p, input_p, grid_p, grad_output_t, input_t, grid_t)
    modes = (interpolation_mode, padding_mode, align_corners)
    return _parts(d, modes, (input_p, grid_p), output_mask)  # type: ignore[return-value]


_MODES = ("interpolation_mode", "padding_mode", "align_corners")


def _stays_inside(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, *_: Any) -> bool:
    """Whether PyTorch's backward of a call stays within its memory.

    Its bilinear CPU kernels do not if padding moves a point to nan.
    """
    if interpolation_mode != 0 or padding_mode == 0 or not input.is_cpu:
        return True
    return known_finite(grid)


def double_vjps(double_backward: Formula, **bound: Any) -> dict[str, Callable[..., Any]]:
    """The vjps of a backward operator, one for each input: its argument output_mask hides the mask of a joint vjp.

    Args:
        double_backward: the formula.
        bound: the names, or values, that its parameters are bound to.
    """

    def of(place: int) -> Callable[..., Any]:
        one = double_backward.bind(**bound, output_mask=[place == i for i in range(3)])
        return bound_to(lambda *given: one(*given)[place], one.parameter_names)

    return {bound.get(name, name): of(i) for i, name in enumerate(("grad_output", "input", "grid"))}


# -- the rules --------------------------------------------------------------------------------------------------------


def _rules(
    forward: str, backward: Any, double_backward: Any, *, has_mask: bool = True, is_fallback: bool = False, **about: Any
) -> None:
    """The rules of an operator and its backward operator.

    Args:
        forward: the operator.
        backward, double_backward: the formulas.
        has_mask: whether the last argument of the backward operator is a mask.
        is_fallback: whether the operator is PyTorch's fallback, whose backward operator was composite before torch 2.12.
        about: arguments of `rule`.
    """

    def backward_jvp(*known: Any) -> tuple[Tensor | None, ...]:
        *values, wanted = known if has_mask else (*known, [True, True])
        found = grid_sampler_backward_jvp(*values, wanted)
        return tuple(t if yes else None for t, yes in zip(found, wanted))

    primals = [f"{n}_{kind}" for n in ("grad_output", "input", "grid") for kind in "pt"]
    has_backward = not is_fallback or reached("2.12")
    rule(
        f"aten::{forward}",
        vjp={("input", "grid"): backward.bind(grad_output="grad")},
        jvp={"result": grid_sampler_jvp},
        defer_to_stock=_stays_inside if has_backward else None,
        # until 2.12, the fallback's gradients are constants, so PyTorch's second derivatives are zero
        improves={"missing": "2.15", "values": "2.12"} if is_fallback else {"missing": "2.15"},
        source="ATen grid_sampler_2d_backward; the jvp is new",
        **about,
    )
    if not has_backward:
        return
    rule(
        f"aten::{forward}_backward",
        vjp=double_vjps(double_backward, ggI="grad_result0", ggGrid="grad_result1"),
        jvp={("result0", "result1"): bound_to(backward_jvp, [*primals, *_MODES, *["output_mask"] * has_mask])},
        improves="missing",
        source="ATen grid_sampler_2d_double_backward; the jvp is new",
        **about,
    )


_rules("grid_sampler_2d", grid_sampler_2d_backward, grid_sampler_2d_double_backward)
_rules("grid_sampler_3d", grid_sampler_3d_backward, grid_sampler_3d_double_backward)
_rules(
    "_grid_sampler_2d_cpu_fallback",
    grid_sampler_2d_backward,
    grid_sampler_2d_double_backward,
    has_mask=False,
    is_fallback=True,
    gaps={"fake": ("the operator has no fake kernel", "2.15")},
)
