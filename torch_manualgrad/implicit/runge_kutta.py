"""Initial value problems on one vector: an explicit Runge-Kutta method with adaptive steps, and scipy's methods."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["SCIPY", "Path", "dormand_prince", "of_scipy"]

Slope = Callable[[float, Tensor], Tensor]

#: The methods of ``scipy.integrate.solve_ivp``.
SCIPY = ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA")

_NODES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


class Path(NamedTuple):
    """A solution.

    Attributes:
        states: at the requested times.
        knots: some of the times that the method stepped to, including the first, and the states there.
        step: the size of the next step; 0 if unknown.
        failed: whether it gave up; the remaining states are then nan.
    """

    states: list[Tensor]
    knots: list[tuple[float, Tensor]]
    step: float
    failed: bool


def dormand_prince(
    f: Slope,
    y: Tensor,
    times: Sequence[float],
    size: Callable[[Tensor, Tensor, Tensor], float],
    maxiter: int,
    step: float = 0.0,
    keep: int = 0,
) -> Path:
    """The method of Dormand and Prince, of order 5. It steps onto each of the times.

    Args:
        f: ``f(t, y)``.
        y: the state at the first time, (n,).
        times: increasing or decreasing.
        size: ``(error, before, after)``: the size of the error of a step; at most 1 is accepted.
        maxiter: the most steps from one time to the next.
        step: the size of the first step; 0: chosen.
        keep: the least number of knots, if there are as many steps; at most twice as many are kept.

    References:
        Dormand and Prince, J. Comput. Appl. Math. 6 (1980) 19; Hairer, Norsett and Wanner, Solving Ordinary Differential
        Equations I (1993), section II.4.
    """
    states, knots, t, taken, every = [y], [(times[0], y)], times[0], 0, 1
    slope = f(t, y) if len(times) > 1 else y
    for end in times[1:]:
        sign, count = math.copysign(1.0, end - t), 0
        if not step:
            step = _first_step(f, t, y, slope, sign, abs(end - t), size)
        while t != end:
            left, count = abs(end - t), count + 1
            h = min(step, left)
            if left - h < 1e-3 * h:  # no tiny step after this one
                h = left
            after, slopes = _stages(f, t, sign * h, y, slope)
            error = size(h * _combined(_ERROR, slopes), y, after)
            factor = min(10.0, max(0.2, 0.9 * error**-0.2)) if error > 0 else 10.0 if error == 0 else 0.2
            if error <= 1:
                y, slope, t = after, slopes[-1], end if h == left else t + sign * h
                taken += 1
                if keep and taken % every == 0:
                    knots.append((t, y))
                    if len(knots) > 2 * keep:
                        knots, every = knots[::2], 2 * every
                step = max(step, h * factor) if h < step else h * factor  # a shortened step says little
            else:
                step = h * factor
            hopeless = math.isnan(error) and not bool((y + slope).isfinite().all())  # no shorter step is better
            if hopeless or count >= maxiter and t != end or step < 4 * torch.finfo(torch.float64).eps * abs(t):
                missing = len(times) - len(states)
                return Path([*states, *[torch.full_like(y, math.nan)] * missing], knots, step, True)
        states.append(y)
    return Path(states, knots, step, False)


def _combined(weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(slopes[0])
    for w, k in zip(weights, slopes):
        if w:
            total.add_(k, alpha=w)
    return total


def _stages(f: Slope, t: float, h: float, y: Tensor, slope: Tensor) -> tuple[Tensor, list[Tensor]]:
    slopes, after = [slope], y
    for c, row in zip(_NODES, _STAGES):
        after = y + h * _combined(row, slopes)
        slopes.append(f(t + c * h, after))
    return after, slopes


def _first_step(
    f: Slope, t: float, y: Tensor, slope: Tensor, sign: float, longest: float, size: Callable[..., float]
) -> float:
    """Hairer's choice: by the size of the first two derivatives."""
    state, first = size(y, y, y), size(slope, y, y)
    h = 0.01 * state / first if 1e-5 < state < math.inf and 1e-5 < first < math.inf else 1e-6 * longest
    h = min(h, longest)
    second = size(f(t + sign * h, y + sign * h * slope) - slope, y, y) / h
    largest = max(first, second)
    if not 0 < largest < math.inf:
        return max(1e-3 * longest, h) if largest == 0 else h
    return min(100 * h, (0.01 / largest) ** 0.2, longest)


def of_scipy(name: str, f: Slope, y: Tensor, times: Sequence[float], rtol: float, atol: Tensor) -> Path:
    """`dormand_prince` with one of scipy's methods, which run on the CPU.

    Args:
        name: one of `SCIPY`.
        f: as in `dormand_prince`.
        y: as in `dormand_prince`.
        times: as in `dormand_prince`.
        rtol: relative tolerance.
        atol: absolute tolerance of each element.
    """
    if len(times) == 1:
        return Path([y], [(times[0], y)], 0.0, False)
    integrate: Any = importlib.import_module("scipy.integrate")  # optional

    def to_tensor(values: Any) -> Tensor:
        return torch.from_numpy(values).to(y)

    found = integrate.solve_ivp(
        lambda t, values: f(float(t), to_tensor(values)).numpy(),
        (times[0], times[-1]),
        y.numpy(),
        method=name,
        dense_output=True,
        rtol=rtol,
        atol=atol.numpy(),
    )
    if not found.success:
        return Path([torch.full_like(y, math.nan)] * len(times), [(times[0], y)], 0.0, True)
    states = [y, *[to_tensor(found.sol(t)) for t in times[1:]]]
    return Path(states, [(float(t), to_tensor(v)) for t, v in zip(found.t, found.y.T)], 0.0, False)
