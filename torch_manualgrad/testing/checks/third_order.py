"""Third derivatives: the eight nestings of reverse and forward mode, along three random directions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ..comparison import modes, report
from ..comparison.context import Context
from ..comparison.problem import Point, Problem, total
from ..numerics.arithmetic import inner
from ..numerics.finite_differences import TOLERANCES, Reference, first_derivative

#: The outer transform first, as in `MODES`.
NESTINGS = tuple("-".join(words) for words in itertools.product(("rev", "fwd"), repeat=3))
Scalar = Callable[..., Tensor]


def third_order(c: Context) -> None:
    """Every nesting against finite differences; where these do not settle, the nestings against each other.

    At a kink of the function or of its first derivative there is no third derivative.
    """
    if (kink := c.total_curvature.kink) is not None:
        return c.add("third order", "", report.KINK, str(kink))
    reference = _reference(c)
    values: dict[str, float] = {}
    for nesting in NESTINGS:
        for engine in ("eager", "func") if nesting.count("fwd") <= 1 else ("func",):  # dual numbers do not nest
            if any(c.gap(part, engine) for part in parts(nesting)):
                continue
            label = f"{nesting}, {engine}"
            found = c.run("third order", label, partial(nested, c.problem, nesting, engine))
            if found is not None:
                values[label] = float(found)
    finite = sorted(x for x in values.values() if math.isfinite(x))
    wrong = ""
    if not reference.settled and len(finite) > 1:
        # the middle one of the nestings is the least suspicious
        reference = Reference(finite[len(finite) // 2], 0.0, reference.scale)
        wrong = "finite differences do not converge here; the reference is another nesting"
    for label, value in values.items():
        c.judge("third order", label, value, reference, c.tolerance.third, wrong)


def parts(nesting: str) -> set[str]:
    """The modes of first and second order that a nesting contains."""
    words = nesting.split("-")
    return {*words, *map("-".join, itertools.pairwise(words))}


def nested(p: Problem, nesting: str, engine: str) -> Tensor:
    f: Scalar = p.curve
    for word, direction in zip(reversed(nesting.split("-")), (p.u, p.v, p.w), strict=True):
        f = ALONG[word, engine](f, direction)
    if engine == "func":
        return f(*p.zero())
    with fwAD.dual_level():
        return f(*(x.requires_grad_() for x in p.zero()))


def _rev_eager(f: Scalar, direction: Point) -> Scalar:
    return lambda *z: inner(modes.backward(f(*z), z, create_graph=True), direction)


def _fwd_eager(f: Scalar, direction: Point) -> Scalar:
    return lambda *z: modes.tangent_of(f(*(modes.make_dual(x, d) for x, d in zip(z, direction, strict=True))))


def _rev_func(f: Scalar, direction: Point) -> Scalar:
    gradient = torch.func.grad(f, argnums=tuple(range(len(direction))))
    return lambda *z: inner(gradient(*z), direction)


def _fwd_func(f: Scalar, direction: Point) -> Scalar:
    return lambda *z: torch.func.jvp(f, z, direction)[1]


#: (mode, engine) -> the derivative along a direction, itself a function to differentiate.
ALONG: dict[tuple[str, str], Callable[[Scalar, Point], Scalar]] = {
    ("rev", "eager"): _rev_eager,
    ("fwd", "eager"): _fwd_eager,
    ("rev", "func"): _rev_func,
    ("fwd", "func"): _fwd_func,
}


def _reference(c: Context) -> Reference:
    """Finite differences of values; if they do not converge, those of a second derivative that has passed its checks.

    Differences of values rely on no derivative, but their rounding error is ``noise / h**3``, instead of ``noise / h``.
    """
    p, curvature = c.wide, c.total_curvature
    start = total(c.joint_slope).step
    reference = total(p.third(start))
    if reference.settled or not curvature.settled:
        return reference
    for engines in modes.SECOND.values():
        for second in engines.values():
            try:
                value = float(second(p, p.curve))
            except Exception:
                continue  # reported by its own mode
            if abs(value - curvature.value) <= curvature.allowance(value, TOLERANCES[torch.float64].second):
                return _of_second(p, second, start)
    return reference


def _of_second(p: Problem, second: Callable[[Problem, Scalar], Tensor], start: float) -> Reference:
    def along(h: float) -> list[float]:
        def displaced(*z: Tensor) -> Tensor:
            return p.curve(*(x + h * w for x, w in zip(z, p.w, strict=True)))

        try:
            return [float(second(p, displaced))]
        except Exception:
            return [math.nan]  # out of the domain

    (value,), (error,), step = first_derivative(along, p.noise, start)
    return Reference(value, error, p.size, step)
