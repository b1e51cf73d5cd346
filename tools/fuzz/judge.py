"""Compares the derivatives of a program in every mode with finite differences."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.rule import Sample
from torch_manualgrad.testing.checks.third_order import NESTINGS, nested
from torch_manualgrad.testing.comparison import modes
from torch_manualgrad.testing.comparison.problem import Problem
from torch_manualgrad.testing.numerics.arithmetic import inner, with_zero_tangent

from .program import Program
from .truth import Number, Sampled

OK, WRONG, RAISES, REFUSED, UNSETTLED, KINK, CLOSE = "ok", "wrong", "raises", "refused", "unsettled", "kink", "close"
FAULTS = (WRONG, RAISES)

CONFIGURATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mg.override()": mg.override,
    'mg.override("*")': partial(mg.override, "*"),
    "mg.override(strong_zero=True)": partial(mg.override, strong_zero=True),
    "mg.override(forward=True)": partial(mg.override, forward=True),
}

#: Relative tolerance of each order, and that of an error estimate that counts as settled.
TOLERANCE = {1: 1e-7, 2: 1e-6, 3: 1e-5, 4: 1e-4}
SETTLED = 1e-4
SINGLE = 1e4  # times the tolerance, where a part of the program is in single precision


@dataclass(frozen=True)
class Mode:
    """One way to a derivative: ``rev-fwd`` by ``func``, or term k of a jet."""

    name: str
    engine: str
    order: int

    def __str__(self) -> str:
        return f"{self.name} [{self.engine}]"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one mode of one program."""

    mode: Mode
    outcome: str
    ours: float = math.nan
    truth: Number = Number(math.nan, math.inf)
    message: str = ""

    @property
    def kind(self) -> tuple[str, str, str]:
        return str(self.mode), self.outcome, re.sub(r"[\W\d]+", " ", self.message)


class Joined(Problem):
    """A problem whose loss takes few operators: all real outputs are joined, and all complex ones."""

    def __init__(self, fn: Callable[..., Any], sample: Sample, seed: int) -> None:
        super().__init__(fn, sample, seed=seed)
        # an output of tiny numbers is what cancellation left, and its derivative rounding
        self.unit = [max(u, 1e-3) for u in self.unit]
        self.half = tuple(k / 2 for k in self.bend)
        self.groups = []
        for is_complex in (False, True):
            places = [j for j, i in enumerate(self.outputs) if self.base[i].is_complex() == is_complex]
            if places:
                weight, square = (
                    torch.cat([(x[j] / self.unit[j] ** k).reshape(-1) for j in places])
                    for k, x in ((1, self.weights), (2, self.squares))
                )
                self.groups.append((places, weight.conj().resolve_conj(), square.to(weight.dtype)))

    def loss(self, *primals: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        outputs = self.call(*primals)
        terms = []
        for places, weight, square in self.groups:
            flat = [outputs[j].reshape(-1) for j in places]
            y = torch.cat(flat) if len(flat) > 1 else flat[0]
            if y.is_complex():
                terms.append((y * (with_zero_tangent(weight, y) + with_zero_tangent(square, y) * y.conj())).sum().real)
            else:
                terms.append((y * (with_zero_tangent(weight, y) + with_zero_tangent(square, y) * y)).sum())
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def bent(self, *z: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            with_zero_tangent(x, d) + d * (1 + with_zero_tangent(k, d) * d)
            for x, d, k in zip(self.primals, z, self.half, strict=True)
        )


class Subject:
    """A program with its loss, its directions, and its derivatives along lines by finite differences."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        self.program = program
        # a copy of each input: a program that writes to one would change it for the next mode
        sample = Sample(*(x.clone() for x in program.inputs.values()))
        self.problem = Joined(program.function, sample, seed)
        self.problem.w = self.problem.u

    @cached_property
    def single(self) -> bool:
        return ".float()" in self.program.text

    @cached_property
    def noise(self) -> float:
        return 6e-8 if self.single else 2e-16

    @cached_property
    def lines(self) -> tuple[Sampled, Sampled, Sampled]:
        """The loss along u + v, u - v and v."""
        p = self.problem
        plus = tuple(a + b for a, b in zip(p.u, p.v, strict=True))
        minus = tuple(a - b for a, b in zip(p.u, p.v, strict=True))

        def along(direction: Sequence[Tensor], t: float) -> float:
            try:
                with torch.no_grad():
                    return float(p.curve(*(t * d for d in direction)))
            except Exception:
                return math.nan  # out of the domain

        return tuple(Sampled(partial(along, d), self.noise) for d in (plus, minus, p.v))  # type: ignore[return-value]

    @cached_property
    def numbers(self) -> list[list[Number]]:
        steps = (0.08, 0.2) if self.single else (0.02, 0.005, 0.08, 0.00125, 0.0003)
        return [line.derivatives(1e-7, steps) for line in self.lines]

    def truth(self, mode: Mode) -> Number:
        a, b, v = self.numbers
        if mode.name.startswith("jet"):
            return a[mode.order]
        if mode.order == 1:
            return 0.5 * (a[1] + b[1])  # along u
        if mode.order == 2:
            return 0.25 * (a[2] + -1.0 * b[2])
        return 1 / 6 * (a[3] + -1.0 * b[3] + -2.0 * v[3])  # along u, u and v

    def scale(self, order: int) -> float:
        sizes = [abs(n[order].value) for n in self.numbers if math.isfinite(n[order].value)]
        return max([1e-3, *sizes])

    def settled(self, mode: Mode) -> bool:
        number = self.truth(mode)
        loose = 100 if self.single else 1
        return math.isfinite(number.value) and number.error <= loose * SETTLED * max(
            abs(number.value), self.scale(mode.order)
        )

    def judge(self, mode: Mode, ours: float) -> Verdict:
        truth = self.truth(mode)
        if not self.settled(mode):
            return Verdict(mode, UNSETTLED, ours, truth)
        gap = abs(ours - truth.value)
        tolerance = TOLERANCE[mode.order] * (SINGLE if self.single else 1)
        allowed = tolerance * max(abs(truth.value), self.scale(mode.order)) + 10 * truth.error
        if gap <= allowed:
            return Verdict(mode, OK, ours, truth)
        slack = 0.3 * (gap if math.isfinite(gap) else max(abs(truth.value), self.scale(mode.order)))
        relevant = self.lines[:1] if mode.name.startswith("jet") else self.lines
        if not self.is_defined:
            return Verdict(mode, KINK, ours, truth)
        orders = range(1, mode.order + 1)
        for line, numbers in zip(relevant, self.numbers, strict=False):
            if not all(
                line.is_smooth(k, numbers[k], slack if k == mode.order else 1e-3 * max(self.scale(k), 1.0))
                for k in orders
            ):
                return Verdict(mode, CLOSE if gap < 100 * allowed else KINK, ours, truth)
        return Verdict(mode, WRONG, ours, truth)

    @cached_property
    def is_defined(self) -> bool:
        """Whether the loss is the same number at the point each time."""
        p = self.problem
        with torch.no_grad():
            return len({float(p.curve(*p.zero())) for _ in range(3)}) == 1

    # modes -----------------------------------------------------------------------------------------------------------

    def modes(self, rng: Random | None) -> Iterator[tuple[Mode, Callable[[], Tensor]]]:
        """All six modes, each with one of the two engines, and a nesting of third order; without `rng` all of them."""
        p = self.problem
        first: dict[str, dict[str, Callable[[], Tensor]]] = {
            "rev": {
                "eager": lambda: inner(modes.gradient(p), p.u),
                "func": lambda: inner(modes.rev_func(p), p.u),
            },
            "fwd": {"eager": lambda: modes.fwd_eager(p, p.u), "func": lambda: modes.fwd_func(p, p.u)},
        }
        second = {
            name: {engine: partial(compute, p, p.curve) for engine, compute in engines.items()}
            for name, engines in modes.SECOND.items()
        }
        third = {
            nesting: {
                # dual numbers do not nest
                engine: partial(nested, p, nesting, engine)
                for engine in (("eager", "func") if nesting.count("fwd") <= 1 else ("func",))
            }
            for nesting in (NESTINGS if rng is None else [rng.choice(NESTINGS)])
        }
        for order, table in enumerate((first, second, third), 1):
            for name, engines in table.items():
                for engine in engines if rng is None else [rng.choice(list(engines))]:
                    yield Mode(name, engine, order), engines[engine]

    def jets(self) -> list[Tensor]:
        """The derivatives along u + v, of order 1 to 4."""
        p = self.problem
        series = [[a + b, None, None, None] for a, b in zip(p.u, p.v, strict=True)]
        _, terms = mg.forward_ad.jet(p.curve, p.zero(), series)
        return terms


def verdicts(subject: Subject, rng: Random | None, only: Mode | None = None) -> Iterator[Verdict]:
    """Of every mode, under whatever override is active."""
    for mode, compute in subject.modes(rng):
        if only is None or mode == only:
            yield attempted(subject, mode, compute)
    if only is not None and only.name != "jet":
        return
    orders = [Mode("jet", f"order {k}", k) for k in range(1, 5)]
    try:
        terms = subject.jets()
    except Exception as error:
        yield Verdict(orders[0], REFUSED if is_refusal(error) else RAISES, message=said(error))
        return
    for mode, term in zip(orders, terms, strict=True):
        if only is None or mode == only:
            yield subject.judge(mode, float(term))


def is_refusal(error: Exception) -> bool:
    """Whether a jet raises its documented error."""
    return isinstance(error, NotImplementedError)


def attempted(subject: Subject, mode: Mode, compute: Callable[[], Tensor]) -> Verdict:
    try:
        ours = float(compute())
    except Exception as error:
        return Verdict(mode, REFUSED if depends_on_order(error) else RAISES, message=said(error))
    return subject.judge(mode, ours)


def depends_on_order(error: Exception) -> bool:
    """Whether a rule refuses a write in place because PyTorch's values depend on the order of the writes."""
    return "refer in part to a single memory location" in str(error)


def said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def has_gap(program: Program, mode: Mode) -> bool:
    """Whether a rule that the program calls declares that the mode raises."""
    words = mode.name.split("-")
    parts = {*words, *map("-".join, itertools.pairwise(words))}
    names = {f"{part}/{mode.engine}" for part in parts} | parts
    return any(names & set(mg.rules[op].gaps) for op in program.operators if op in mg.rules)
