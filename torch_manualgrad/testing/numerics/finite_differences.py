"""Finite differences with an error estimate, and tolerances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .kinks import Range


@dataclass(frozen=True)
class Tolerance:
    """Relative and absolute tolerances of first and second derivatives, from which those of third derivatives follow."""

    first: tuple[float, float]
    second: tuple[float, float]

    @property
    def third(self) -> tuple[float, float]:
        """The third order loses as much accuracy as the second: it differentiates formulas of one more kind."""
        relative, absolute = (b * b / a if a else b for a, b in zip(self.first, self.second, strict=True))
        return relative, absolute


#: Keyed by the dtype of the sample. The absolute part is relative to the loss, which the checker scales to about one.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance((1e-7, 1e-9), (1e-6, 1e-8)),
    torch.complex128: Tolerance((1e-7, 1e-9), (1e-6, 1e-8)),
    torch.float32: Tolerance((1e-3, 1e-4), (5e-3, 5e-4)),
    torch.complex64: Tolerance((1e-3, 1e-4), (5e-3, 5e-4)),
    torch.bfloat16: Tolerance((5e-2, 5e-2), (1e-1, 2e-1)),
    torch.float16: Tolerance((1e-2, 1e-2), (5e-2, 5e-2)),
    torch.complex32: Tolerance((1e-2, 1e-2), (5e-2, 5e-2)),
}


#: The first step of finite differences, in units of a direction.
STEP = 2.0**-4


@dataclass(frozen=True)
class Reference:
    """A number from finite differences, its error estimate, and the magnitude by which both are judged.

    `step` is the largest step that smaller ones do not contradict. `kink` is the range of possible numbers where the
    function is not differentiable; None where it is differentiable.
    """

    value: float
    error: float
    scale: float
    step: float = STEP
    kink: Range | None = None

    @property
    def settled(self) -> bool:
        return math.isfinite(self.value) and 10 * self.error <= 1e-4 * max(abs(self.value), 0.1 * self.scale)

    def allowance(self, ours: float, tolerance: tuple[float, float]) -> float:
        relative, absolute = tolerance
        return relative * max(abs(self.value), abs(ours)) + absolute * self.scale + 10 * self.error


def extrapolate(
    difference: Callable[[float], Sequence[float]], noise: float, order: int, levels: int, start: float = STEP
) -> tuple[list[float], list[float], float]:
    """The limit of `difference(h)` as $h$ goes to 0, an even series in $h$, with an error estimate for each component.

    Ridders' method: halve the step, eliminate one more power of h**2 at each level (Neville's tableau), keep the entry
    whose neighbours differ least. If a thousand times smaller steps contradict the number on which a few steps agree, for
    example because these span many periods of an angle, the steps are dropped and the method restarts with smaller ones.

    Args:
        difference: a difference quotient for a step, by component.
        noise: the rounding error of the function; that of the difference is ``noise / h**order``.
        order: of the derivative.
        levels: the largest number of steps.
        start: the first step.

    Returns:
        The limits, their errors, and the first of the steps that were not dropped.
    """
    best: list[float] = []
    errors: list[float] = []
    previous: list[list[float]] = []
    h = start
    for _ in range(levels):
        values = [float(v) for v in difference(h)]
        if not previous:
            best, errors, start = list(values), [math.inf] * len(values), h
        row = [values]
        floor = noise / h**order
        for column in range(1, len(previous) + 1):
            factor = 4.0**column
            row.append(
                [(factor * a - b) / (factor - 1) for a, b in zip(row[column - 1], previous[column - 1], strict=True)]
            )
            for i, value in enumerate(row[column]):
                error = max(abs(value - row[column - 1][i]), abs(value - previous[column - 1][i]), floor)
                # a nan compares false, which skips a step out of the domain
                if math.isfinite(value) and error < errors[i]:
                    best[i], errors[i] = value, error
        previous = row
        # smaller steps cannot do better than the rounding error of this one
        if len(row) >= 3 and all(e <= 4 * floor or e <= 1e-11 * abs(b) for b, e in zip(best, errors, strict=True)):
            near = h * 2.0**-10
            if not _contradicted(best, difference(near), noise / near**order):
                break
            previous = []
        h /= 2
    return best, errors, start


def _contradicted(best: Sequence[float], nearer: Sequence[float], noise: float) -> bool:
    """Whether a difference over a far smaller step, with this rounding error, contradicts the number."""
    return any(abs(n - b) > 1e-3 * max(abs(b), 1.0) + 1e3 * noise for b, n in zip(best, nearer, strict=True))


def first_derivative(
    f: Callable[[float], Sequence[float]], noise: float, start: float = STEP
) -> tuple[list[float], list[float], float]:
    """$d/dh f(h)$ at 0, by component, with errors, and the first step that was used."""

    def difference(h: float) -> list[float]:
        return [(a - b) / (2 * h) for a, b in zip(f(h), f(-h), strict=True)]

    return extrapolate(difference, noise, 1, 24, start)


def mixed_derivative(
    plus: Callable[[float], Sequence[float]],
    minus: Callable[[float], Sequence[float]],
    noise: float,
    start: float = STEP,
) -> tuple[list[float], list[float], float]:
    """$d/ds d/dt$ of $f$ at 0, from $f$ along $u + v$ and $u - v$: a quarter of the second derivatives' difference."""

    def difference(h: float) -> list[float]:
        corners = zip(plus(h), plus(-h), minus(h), minus(-h), strict=True)
        return [(a + b - c - d) / (4 * h * h) for a, b, c, d in corners]

    return extrapolate(difference, noise, 2, 14, start)


def third_derivative(
    corner: Callable[[float, Sequence[int]], Sequence[float]], noise: float, start: float = STEP
) -> tuple[list[float], list[float], float]:
    """$d/dr d/ds d/dt$ of $f$ at 0, from ``corner(h, signs)``: $f$ at $h$ times the sum of the signed directions."""

    def difference(h: float) -> list[float]:
        signs = list(itertools.product((1, -1), repeat=3))
        values = zip(*(corner(h, s) for s in signs), strict=True)
        return [sum(math.prod(s) * x for s, x in zip(signs, row, strict=True)) / (8 * h**3) for row in values]

    return extrapolate(difference, noise, 3, 12, start)


def stays(difference: Callable[[float], Sequence[float]], step: float) -> list[bool]:
    """Whether a difference is the same for all small steps; if the function is smooth enough, it is proportional to $h$."""
    far, near = difference(step * 2.0**-6), difference(step * 2.0**-9)
    return [abs(b) > 1e-4 and abs(a - b) < 0.3 * abs(b) for a, b in zip(far, near, strict=True)]


def worst(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """The largest absolute difference of two tensors, and its ratio to the largest magnitude; nan equals nan."""
    wide = torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64
    a, b = ours.detach().to(wide), theirs.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros((), dtype=wide, device=a.device), a - b).abs()
    if gap.numel() == 0:
        return 0.0, 0.0
    absolute = float(gap.max()) if not gap.isnan().any() else math.nan
    finite = torch.where(b.isfinite(), b, torch.zeros_like(b)).abs().max()
    if absolute == 0:
        return 0.0, 0.0
    return absolute, absolute / max(float(finite), 1e-300)


def tensors_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: tuple[float, float]) -> bool:
    if ours.shape != theirs.shape:
        return False
    absolute, relative = worst(ours, theirs)
    return absolute == 0 or relative <= tolerance[0] or absolute <= tolerance[1] * 1e-3
