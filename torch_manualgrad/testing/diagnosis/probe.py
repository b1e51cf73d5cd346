"""Runs one check again after a failure: along other directions, for other outputs, at another sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks.table import TABLE
from ..comparison.context import Context
from ..comparison.modes import SECOND
from ..comparison.problem import Point, Problem
from ..comparison.report import WRONG, Element, Result
from ..numerics.arithmetic import magnitude, widen

#: Inputs, or outputs, with more coordinates are not inspected one by one; a complex element has two.
MOST = 64
#: The key of the whole loss, differentiated where no single output shows the mistake.
LOSS = "the loss"


def again(c: Context, check: str, problem: Problem) -> list[Result]:
    """The results of one check for another problem; none if it cannot be run there."""
    other = replace(c, problem=problem, results=[], values={})
    try:
        TABLE[check].run(other)
    except Exception:
        return []
    return other.results


@dataclass(frozen=True)
class Entry:
    """One real coordinate of a list of tensors: the real or the imaginary part of an element."""

    tensor: int
    position: int
    unit: complex

    def fill(self, tensors: Sequence[Tensor], value: float = 1.0) -> Point:
        """Zeros like the tensors, with `value` here."""
        filled = tuple(torch.zeros_like(x) for x in tensors)
        flat = torch.zeros(filled[self.tensor].numel(), dtype=filled[self.tensor].dtype, device="cpu")
        flat[self.position] = value
        flat *= self.unit
        filled[self.tensor].copy_(flat.reshape(filled[self.tensor].shape))
        return filled

    def name(self, names: Sequence[str], tensors: Sequence[Tensor]) -> str:
        x = tensors[self.tensor]
        index = (
            [int(i) for i in torch.unravel_index(torch.tensor(self.position, device="cpu"), x.shape)] if x.dim() else ""
        )
        part = ("Im " if self.unit == 1j else "Re ") if x.is_complex() else ""
        return f"{part}{names[self.tensor]}{index}"


def entries(tensors: Sequence[Tensor]) -> list[Entry]:
    """All coordinates; none if there are too many."""
    units = [(1.0, 1j) if x.is_complex() else (1.0,) for x in tensors]
    if sum(x.numel() * len(unit) for x, unit in zip(tensors, units, strict=True)) > MOST:
        return []
    return [Entry(i, k, unit) for i, x in enumerate(tensors) for k in range(x.numel()) for unit in units[i]]


@dataclass(frozen=True)
class Wrong:
    """A wrong result of a problem that has one entry only, moved by `step`."""

    entry: Entry
    result: Result
    step: float

    @property
    def gap(self) -> float:
        gap = self.result.absolute / self.step
        return gap if math.isfinite(gap) else math.inf


class Probe:
    """Further measurements of the failures of one context, in a limited time.

    Args:
        c: the context, after its checks have run.
        seconds: the time after which nothing more is run.
    """

    def __init__(self, c: Context, seconds: float = 5.0) -> None:
        self.c, self.p = c, c.problem
        self.deadline = time.monotonic() + seconds
        self.inputs = entries(self.p.primals)
        self.outputs = entries(self.p.weights)
        self._known: dict[Any, list[Result]] = {}

    def results(self, check: str, key: Any, make: Callable[[], Problem]) -> list[Result]:
        """`again`, once for each key."""
        if (check, key) not in self._known:
            self._known[check, key] = [] if time.monotonic() > self.deadline else again(self.c, check, make())
        return self._known[check, key]

    def gradient(self, check: str, engine: str, p: Problem | None = None, key: Any = "") -> list[tuple[Tensor, Tensor]]:
        """For each input, the derivative of the loss with respect to its elements, ours and the reference.

        Args:
            check: rev or fwd.
            engine: the engine that computes ours.
            p: another problem with the same inputs, identified by `key`.
            key: identifies `p`.

        Returns:
            Pairs of tensors with the shapes of the inputs; none where an element could not be determined.
        """
        p = p or self.p
        found = [
            tuple(
                torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float64), device="cpu") for _ in range(2)
            )
            for x in p.primals
        ]
        for e in self.inputs:
            size = magnitude(p.primals[e.tensor])
            result = self._at(check, engine, (key, e), partial(_along, p, "u", e))
            if result is None or not math.isfinite(result.ours) or not math.isfinite(result.reference):
                return []
            for x, value in zip(found[e.tensor], (result.ours, result.reference), strict=True):
                x.reshape(-1)[e.position] += value / size * (e.unit if x.is_complex() else 1.0)
        return [(a, b) for a, b in found] if self.inputs else []

    def element(self, check: str, engine: str) -> Element | None:
        """The input element whose derivative has the largest error, and the output that is differentiated."""
        p, order = self.p, _order(check, engine)
        if not order:
            return None
        ranked = self._wrong(check, engine, "", self.inputs, partial(_along, p, "u"), p.primals)
        # the next worst ones, if no single output shows the error for the worst one
        found = [self._through(check, engine, inner) for inner in ranked[: 2 * order - 1]]
        return next((e for e in found if LOSS not in e.of), found[0]) if found else None

    def _through(self, check: str, engine: str, inner: Wrong) -> Element:
        """The element, with the inner derivative taken along one entry of an input."""
        p, scale, result = self.p, inner.step, inner.result
        moved, at, of = _along(p, "u", inner.entry), inner.entry.name(p.names, p.primals), ""
        key: Any = "", inner.entry
        if _order(check, engine) == 2:
            moved = moved.but(bend=p.zero())
            outer = self._wrong(check, engine, key, self.inputs, partial(_along, moved, "v"), p.primals)
            if not outer:
                return Element(at, f"(the derivative of {LOSS} along a direction)", *_scaled(result, scale))
            result, scale = outer[0].result, scale * outer[0].step
            moved, key = _along(moved, "v", outer[0].entry), (key, outer[0].entry)
            of, at = at, outer[0].entry.name(p.names, p.primals)
        what, numbers = LOSS, _scaled(result, scale)
        if last := self._wrong(check, engine, key, self.outputs, partial(single, moved)):
            entry = last[0].entry
            what, numbers = self._output(entry), _scaled(last[0].result, scale / p.unit[entry.tensor])
        return Element(at, f"(d {what} / d {of})" if of else what, *numbers)

    def _wrong(
        self,
        check: str,
        engine: str,
        key: Any,
        choices: Sequence[Entry],
        make: Callable[[Entry], Problem],
        steps: Sequence[Tensor] | None = None,
    ) -> list[Wrong]:
        """The entries at which the result is wrong, the worst first; steps are of the magnitude of the tensors."""
        found = []
        for e in choices:
            result = self._at(check, engine, (key, e), partial(make, e))
            if result is not None and result.outcome == WRONG:
                found.append(Wrong(e, result, magnitude(steps[e.tensor]) if steps else 1.0))
        # of nearly equal ones the first, so that rounding does not decide
        return sorted(found, key=lambda w: -float(f"{w.gap:.4g}"))

    def _at(self, check: str, engine: str, key: Any, make: Callable[[], Problem]) -> Result | None:
        return next((r for r in self.results(check, key, make) if r.engine == engine), None)

    def _output(self, entry: Entry) -> str:
        p = self.p
        outputs = [p.base[i] for i in p.outputs]
        names = [f"output {i}" if len(p.base) > 1 else "output" for i in p.outputs]
        mask = p.finite[entry.tensor]
        position = entry.position if mask is None else int(mask[entry.position])
        return replace(entry, position=position).name(names, outputs)


def _order(check: str, engine: str) -> int:
    """The order of the derivative that a check computes: 1 along u, 2 along u and v; 0 for another check."""
    if check in SECOND or engine.endswith("rev-rev"):
        return 2
    return int(check in ("rev", "fwd", "duality", "undefined cotangents"))


def single(p: Problem, entry: Entry) -> Problem:
    """The problem whose loss is one entry of one output, in that output's unit."""
    return linear(p, entry.fill([widen(w) for w in p.weights]))


def linear(p: Problem, weights: Sequence[Tensor]) -> Problem:
    """The problem whose loss is the outputs' product with these weights."""
    return p.but(weights=list(weights), squares=[torch.zeros_like(q) for q in p.squares])


def _along(p: Problem, name: str, e: Entry) -> Problem:
    return p.but(**{name: e.fill(p.primals, magnitude(p.primals[e.tensor]))})


def _scaled(result: Result, scale: float) -> tuple[float, float]:
    return result.ours / scale, result.reference / scale
