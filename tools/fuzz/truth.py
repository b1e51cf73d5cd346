"""Derivatives along lines by finite differences with 13 points, each with an estimate of its error.

References:
    B. Fornberg, Generation of finite difference formulas on arbitrarily spaced grids, Math. Comp. 51 (1988), 699-706.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

ORDERS = 4
#: In units of a direction. The first settles most programs.
STEPS = (0.02, 0.005, 0.08, 0.00125, 0.0003)

Function = Callable[[float], float]


@dataclass(frozen=True)
class Number:
    """A derivative, the estimate of its error, and the step that it is from."""

    value: float
    error: float
    step: float = 0.0

    @property
    def relative(self) -> float:
        """The error in units of the value: a step that spans periods of a fast function gives a small value."""
        return math.inf if not math.isfinite(self.error) else self.error / max(abs(self.value), 1e-300)

    def __add__(self, other: Number) -> Number:
        return Number(self.value + other.value, self.error + other.error, min(self.step, other.step))

    def __rmul__(self, factor: float) -> Number:
        return Number(factor * self.value, abs(factor) * self.error, self.step)


@cache
def weights(points: tuple[int, ...], order: int) -> tuple[float, ...]:
    """The weights of the derivative of this order at 0, of values at these integers; exact until the last rounding."""
    n = len(points)
    rows = [
        [Fraction(p) ** i for p in points] + [Fraction(math.factorial(order) if i == order else 0)] for i in range(n)
    ]
    for i in range(n):
        pivot = next(k for k in range(i, n) if rows[k][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for k in range(n):
            if k != i and rows[k][i]:
                rows[k] = [a - rows[k][i] * b for a, b in zip(rows[k], rows[i], strict=True)]
    return tuple(float(row[-1]) for row in rows)


class Sampled:
    """A function of one variable whose values are kept."""

    def __init__(self, f: Function, noise: float) -> None:
        self.f, self.noise = f, noise
        self.known: dict[float, float] = {}

    def __call__(self, t: float) -> float:
        if t not in self.known:
            self.known[t] = self.f(t)
        return self.known[t]

    def at(self, points: tuple[int, ...], fewer: tuple[int, ...], order: int, h: float) -> Number:
        """From these points at distances h; the error is judged by a formula of fewer points."""

        def formula(where: tuple[int, ...]) -> float:
            w = weights(where, order)
            return math.fsum(a * self(p * h) for a, p in zip(w, where, strict=True)) / h**order

        value = formula(points)
        largest = max(abs(self(p * h)) for p in points)
        rounding = self.noise * largest * sum(map(abs, weights(points, order))) / h**order
        error = abs(value - formula(fewer)) + rounding + self.unresolved(points, order, h)
        return Number(value, error if math.isfinite(error) else math.inf, h)

    def unresolved(self, points: tuple[int, ...], order: int, h: float) -> float:
        """The error that the value at 0 shows: how far it is from that of the polynomial through the other points.

        Where the function varies faster than the points lie, such as near a pole, the others may look smooth.
        """
        others = tuple(p for p in points if p)
        terms = [self(0.0), *(-a * self(p * h) for a, p in zip(weights(others, 0), others, strict=True))]
        gap = abs(math.fsum(terms)) - self.noise * math.fsum(map(abs, terms))
        return max(gap, 0.0) * max(map(abs, weights(points, order))) / h**order

    def derivative(self, order: int, h: float) -> Number:
        return self.at(tuple(range(-6, 7)), tuple(range(-5, 6)), order, h)

    def derivatives(self, wanted: float, steps: Sequence[float] = STEPS) -> list[Number]:
        """Of order 0 to 4. More steps are tried until all errors are at most `wanted`, relative."""
        best = [Number(math.nan, math.inf)] * (ORDERS + 1)
        for h in steps:
            for k in range(1, ORDERS + 1):
                found = self.derivative(k, h)
                if found.relative < best[k].relative:
                    best[k] = found
            if all(b.error <= wanted * max(abs(b.value), 1.0) for b in best[1:]):
                break
        best[0] = Number(self(0.0), 0.0)
        return best

    def is_smooth(self, order: int, number: Number, slack: float) -> bool:
        """Whether the derivatives from both sides are that number, up to `slack`, and smaller steps do not contradict it.

        Near a kink the central formula may be exact to all digits and mean nothing.
        """
        for h in [number.step / 4**i for i in range(6)]:  # far steps span many periods of a fast function
            central = self.derivative(order, h)
            if not abs(central.value - number.value) <= slack + 10 * central.error + 10 * number.error:
                return False
        for sign in (1, -1):
            one_sided = [
                self.at(
                    tuple(sign * i for i in range(10)), tuple(sign * i for i in range(9)), order, number.step * scale
                )
                for scale in (1.0, 0.3, 0.1)
            ]
            best = min(one_sided, key=lambda n: n.error)
            if not abs(best.value - number.value) <= slack + 3 * best.error:
                return False
            if best.error > slack:  # nothing is known of this side
                return False
        return True
