"""The rules of grid sampling; the formulas are in `grid_sampler`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, bound_to, known_finite, reached, rule

from .common import random
from .grid_sampler import (
    grid_sampler_2d_backward,
    grid_sampler_2d_double_backward,
    grid_sampler_3d_backward,
    grid_sampler_3d_double_backward,
    grid_sampler_backward_jvp,
    grid_sampler_jvp,
)

__all__ = ["double_vjps"]

_MODES = ("interpolation_mode", "padding_mode", "align_corners")


def _vjp(
    backward: Any, grad: Tensor, input: Tensor, grid: Tensor, modes: Sequence[Any], output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    found = backward(grad, input, grid, *modes, list(output_mask))
    return tuple(g if yes else None for g, yes in zip(found, output_mask))


def _stays_inside(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, *_: Any) -> bool:
    """Calls whose backward in PyTorch stays inside of its memory.

    Its bilinear kernels for the CPU do not where padding moves a point to nan.
    """
    if interpolation_mode != 0 or padding_mode == 0 or not input.is_cpu:
        return True
    return known_finite(grid)


def double_vjps(
    double_backward: Any,
    image: str = "input",
    cotangents: Sequence[str] = ("grad_result0", "grad_result1"),
    **modes: Any,
) -> dict[str, Callable[..., Any]]:
    """The vjps of a backward operator.

    Args:
        double_backward: the formula.
        image: the name of the image.
        cotangents: the names of those of the two results.
        modes: the values of arguments of aten::grid_sampler that the operator lacks.
    """
    asked = [m for m in _MODES if m not in modes]
    names = ("grad_output", image, "grid")

    def of(place: int) -> Callable[..., Any]:
        mask = [place == i for i in range(3)]

        def vjp(*given: Any) -> Tensor | None:
            if given[0] is None and given[1] is None:
                return None
            values = {**modes, **dict(zip(asked, given[5:]))}
            return double_backward(*given[:5], *[values[m] for m in _MODES], mask)[place]

        return bound_to(vjp, [*cotangents, *names, *asked])

    return {name: of(place) for place, name in enumerate(names)}


# -- samples ----------------------------------------------------------------------------------------------------------


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


def _forward(inputs: Callable[..., Any]) -> Callable[..., Iterable[Sample]]:
    return lambda dtype, device: [Sample(*given) for given in inputs(dtype, device)]


def _backward(inputs: Callable[..., Any], *rest: Any) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for image, grid, *modes in inputs(dtype, device):
            shape = (*image.shape[:2], *grid.shape[1:-1])
            yield Sample(random(*shape, dtype=image.dtype, device=device, seed=3), image, grid, *modes, *rest)

    return samples


_IN_2D = _inputs(2, (0, 0, False), (0, 2, True), (1, 1, False), (2, 0, False), (2, 2, False))
_IN_3D = _inputs(3, (0, 0, True), (0, 1, False), (1, 2, False))
_IN_SINGLE = _inputs(2, (0, 0, False), (1, 1, True), dtype=torch.float32)


# -- the rules --------------------------------------------------------------------------------------------------------


def _rules(
    forward: str,
    backward_name: str,
    backward: Any,
    double_backward: Any,
    inputs: Callable[..., Any],
    *mask: Any,
    in_double: str | None = None,
    **about: Any,
) -> None:
    """Those of an operator and its backward.

    Args:
        forward, backward_name: the operators.
        backward, double_backward: the formulas.
        inputs: for the samples.
        mask: the last argument of the backward, if it has it.
        in_double: the operator that takes double precision, where these do not.
        about: arguments of `rule`.
    """

    def vjp(grad: Tensor, input: Tensor, grid: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        return _vjp(backward, grad, input, grid, rest[:3], rest[3])

    def backward_jvp(*known: Any) -> tuple[Tensor | None, ...]:
        *values, wanted = known if mask else (*known, [True, True])
        found = grid_sampler_backward_jvp(*values, wanted)
        return tuple(t if yes else None for t, yes in zip(found, wanted))

    def probe(name: str, wider: str | None, *more: Any) -> Callable[..., Any] | None:
        def call(*args: Any) -> Any:
            if wider and args[0].dtype == torch.float64:
                return getattr(torch.ops.aten, wider)(*args, *more)
            return getattr(torch.ops.aten, name)(*args)

        return call if wider else None

    primals = [f"{n}_{kind}" for n in ("grad_output", "input", "grid") for kind in "pt"]
    has_backward = in_double is None or reached("2.12")  # that of the fallback was composite
    rule(
        f"aten::{forward}",
        vjp={("input", "grid"): bound_to(vjp, ["grad", "input", "grid", *_MODES, "output_mask"])},
        jvp={"result": grid_sampler_jvp},
        defer_to_stock=_stays_inside if has_backward else None,
        # the fallback's gradients are constants until 2.12, of which PyTorch makes second derivatives of zero
        improves={"missing": "2.15"} if in_double is None else {"missing": "2.15", "values": "2.12"},
        source="ATen grid_sampler_2d_backward; the jvp is new",
        samples=_forward(inputs),
        probe=probe(forward, in_double),
        **about,
    )
    if not has_backward:
        return
    rule(
        f"aten::{backward_name}",
        vjp=double_vjps(double_backward),
        jvp={("result0", "result1"): bound_to(backward_jvp, [*primals, *_MODES, *["output_mask"] * len(mask)])},
        improves="missing",
        source="ATen grid_sampler_2d_double_backward; the jvp is new",
        samples=_backward(inputs, *mask),
        probe=probe(backward_name, in_double and f"{in_double}_backward", [True, True]),
        **about,
    )


_of_2d = (grid_sampler_2d_backward, grid_sampler_2d_double_backward)
_of_3d = (grid_sampler_3d_backward, grid_sampler_3d_double_backward)
_rules("grid_sampler_2d", "grid_sampler_2d_backward", *_of_2d, _IN_2D, [True, True])
_rules("grid_sampler_3d", "grid_sampler_3d_backward", *_of_3d, _IN_3D, [True, True])
_fallback = "_grid_sampler_2d_cpu_fallback"
_rules(
    _fallback,
    f"{_fallback}_backward",
    *_of_2d,
    _IN_SINGLE,
    in_double="grid_sampler_2d",
    gaps={"fake": ("the operator has no fake kernel", "2.15")},
)
