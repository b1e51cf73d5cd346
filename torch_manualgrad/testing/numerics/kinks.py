"""Whether a function is differentiable at a point: its difference quotients near that point.

Clarke's generalized gradients of f at x are the numbers between the lower and the upper limit of
``(f(y + h u) - f(y)) / h`` as y -> x and h -> 0, along each direction u. They are one number where f is continuously
differentiable, and an interval at a kink. So a range of quotients at points around x, ever closer to it, decides:

- it shrinks to one number: f is differentiable, and the derivative is that number;
- it stays an interval: f has a kink, and only a value outside of the interval is certainly not a generalized gradient;
- it grows: f is not Lipschitz there (a pole, a jump, the square root at zero) or is mostly rounding error.

A kink's interval is of finite numbers, so nan and inf are not generalized gradients.

References:
    F. H. Clarke, Optimization and Nonsmooth Analysis (1983), sections 2.1 and 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Point = Sequence[Tensor]

#: The distances from the point, in units of its magnitude.
RADII = (1e-4, 1e-6)
#: The number of points at each distance: a few show that a function is smooth, more find the range at a kink, and even
#: more are tried before a value is reported as outside of the range.
FEW, MANY, ACCUSING = 2, 14, 250


@dataclass(frozen=True)
class Range:
    """The quotients of each entry of a function along one direction.

    Attributes:
        low: the smallest.
        high: the largest.
        bounded: whether the range did not grow from the larger distance to the smaller one.
        smooth: whether it shrinks to one number.
        scale: the magnitude by which differences are judged.
    """

    low: Tensor
    high: Tensor
    bounded: Tensor
    smooth: Tensor
    scale: Tensor

    @staticmethod
    def anything() -> Range:
        """The range of an unknown number."""
        infinite, no = torch.tensor(torch.inf, dtype=torch.float64, device="cpu"), torch.tensor(False, device="cpu")
        return Range(-infinite, infinite, no, no, torch.zeros((), dtype=torch.float64, device="cpu"))

    @staticmethod
    def one(value: float) -> Range:
        number, yes = torch.tensor(value, dtype=torch.float64, device="cpu"), torch.tensor(True, device="cpu")
        return Range(number, number, yes, yes, torch.zeros((), dtype=torch.float64, device="cpu"))

    def __str__(self) -> str:
        if not bool(self.low.isfinite()):
            return "there is no derivative of this order"
        return f"the derivatives nearby are between {float(self.low):.6g} and {float(self.high):.6g}"

    def __add__(self, other: Range) -> Range:
        bounded, smooth = self.bounded & other.bounded, self.smooth & other.smooth
        return Range(self.low + other.low, self.high + other.high, bounded, smooth, self.scale + other.scale)

    @property
    def width(self) -> Tensor:
        return self.high - self.low

    @property
    def largest(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    def excludes(self, ours: Tensor, tolerance: tuple[float, float]) -> Tensor:
        """Where `ours` is certainly not a generalized gradient. The range is sampled, so half of it is added."""
        relative, absolute = max(tolerance[0], 1e-4), max(tolerance[1], 1e-6)
        slack = self.width / 2 + relative * torch.maximum(self.largest, ours.abs()) + absolute * self.scale
        inside = (ours >= self.low - slack) & (ours <= self.high + slack)
        return self.bounded & ~(inside & ours.isfinite())

    def sum(self, weights: Tensor) -> Range:
        """The range of a weighted sum, if each entry takes any value of its own range."""
        used = weights != 0
        ends = torch.where(used, torch.stack([weights * self.low, weights * self.high]), 0.0)
        low, high = ends.amin(0).sum(), ends.amax(0).sum()
        bounded = (self.bounded | ~used).all() & low.isfinite() & high.isfinite()
        scale = torch.where(used, weights.abs() * self.scale, 0.0).sum()
        return Range(low, high, bounded, (self.smooth | ~used).all(), scale)


def ranges(
    f: Callable[..., Tensor],
    at: Point,
    directions: Sequence[Point],
    scales: Sequence[float],
    groups: Sequence[int],
    points: int | None = None,
) -> list[Range]:
    """The range of the difference quotients of `f` near a point, along each direction.

    Args:
        f: a function of tensors to a flat tensor of real numbers in double precision. Where it raises, it counts as
            unbounded.
        at: the point.
        directions: with the shapes of the point, and at most about as large as `scales`.
        scales: the magnitude of each input.
        groups: the lengths of consecutive entries that have one scale: those of one output.
        points: the number of points to try around this one; None for a few, then more if these do not show that `f` is
            smooth.

    Returns:
        A range for each direction.
    """
    generator = torch.Generator().manual_seed(0)
    center = f(*at)
    found: list[list[list[Tensor]]] = [[[] for _ in RADII] for _ in directions]

    def value(*point: Tensor) -> Tensor:
        try:
            return f(*point)
        except Exception:
            return torch.full_like(center, torch.nan)

    def quotients_at(offset: Point | None) -> None:
        for k, radius in enumerate(RADII):
            base = at if offset is None else _moved(at, radius, offset)
            start = center if offset is None else value(*base)
            for quotients, u in zip(found, directions, strict=True):
                # at the point itself, steps to both sides; elsewhere a step that is short compared with the distance
                for h in (radius, -radius) if offset is None else (radius / 16,):
                    quotients[k].append((value(*_moved(base, h, u)) - start) / h)

    def offset() -> Point:
        # of different magnitudes, as the order of the elements decides at a tie, and their ratio at a singular matrix
        return [
            uniform(x, generator) * 100.0 ** -uniform(x.real, generator, 0, 1) * scale
            for x, scale in zip(at, scales, strict=True)
        ]

    quotients_at(None)
    for _ in range(FEW if points is None else points):
        quotients_at(offset())
    result = [_range(quotients, center, groups) for quotients in found]
    if points is None and not all(bool(r.smooth.all()) for r in result):
        return ranges(f, at, directions, scales, groups, MANY)
    return result


def _range(quotients: list[list[Tensor]], center: Tensor, groups: Sequence[int]) -> Range:
    far, near = (torch.stack(q) for q in quotients)
    (far_low, far_high), (low, high) = ((q.amin(0), q.amax(0)) for q in (far, near))
    largest = torch.maximum(low.abs(), high.abs())

    def of_group(x: Tensor) -> Tensor:
        return torch.cat([m.max().expand_as(m) if m.numel() else m for m in x.split(list(groups))])

    slack = 0.1 * (far_high - far_low) + 1e-4 * largest + 1e-6 * of_group(center.abs())
    # nan compares false
    bounded = far_low.isfinite() & far_high.isfinite() & (low >= far_low - slack) & (high <= far_high + slack)
    # a pole that rounding has made finite, such as the inverse of a singular matrix
    for step, quotient in zip((RADII[-1], -RADII[-1]), near, strict=False):
        bounded &= (center + step * quotient).abs() >= center.abs() / 2
    # unbounded entries do not set the scale of the others
    scale = of_group(torch.where(bounded, torch.maximum(center.abs(), largest), 0.0))
    shrinks = (high - low) <= 0.2 * (far_high - far_low)
    smooth = bounded & (shrinks | (high - low <= 1e-4 * largest + 1e-5 * scale))
    # at a kink only up to rounding, as the standard deviation of equal numbers whose mean is rounded
    bounded &= smooth | (center == 0) | (center.abs() > 1e-12 * largest)
    return Range(low, high, bounded, smooth, scale)


def _moved(at: Point, h: float, u: Point) -> Point:
    return [x + h * d for x, d in zip(at, u, strict=True)]


def uniform(x: Tensor, generator: torch.Generator, low: float = -1.0, high: float = 1.0) -> Tensor:
    """Random numbers with the shape of `x`, in double precision; both parts of complex ones."""
    shape = (*x.shape, 2) if x.is_complex() else x.shape
    drawn = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu") * (high - low) + low
    return (torch.view_as_complex(drawn) if x.is_complex() else drawn).to(x.device)
