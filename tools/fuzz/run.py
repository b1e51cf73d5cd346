"""Runs programs, shrinks what fails, and counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random

import torch

from . import judge
from .generate import generate
from .judge import CONFIGURATIONS, Mode, Subject, Verdict
from .program import Line, Program


def key_of(program: Program, verdict: Verdict) -> str:
    kind = "jet" if verdict.mode.name == "jet" else f"order {verdict.mode.order}"
    return f"{verdict.outcome} in {kind}: {', '.join(sorted(set(program.operators)))}"


@dataclass
class Finding:
    """A program whose derivative is wrong or raises, as small as it was made."""

    number: int
    configuration: str
    verdict: Verdict
    program: Program
    stock: Verdict

    @property
    def key(self) -> str:
        """A rough key for findings of one cause: the remaining operators."""
        return key_of(self.program, self.verdict)

    @property
    def text(self) -> str:
        """A program that can be run, and shows the disagreement."""
        v, mode = self.verdict, self.verdict.mode
        if v.outcome == judge.WRONG:
            what = f"{v.ours:.10g}; finite differences: {v.truth.value:.10g} (error {v.truth.error:.1g})"
        else:
            what = v.message
        stock = self.stock
        theirs = stock.message if stock.outcome == judge.RAISES else f"{stock.outcome}, {stock.ours:.10g}"
        names = ", ".join(self.program.inputs)
        if mode.name == "jet":
            call = (
                f"with {self.configuration}:\n    for y in program({names}):\n        print(y)\n"
                f"    one = [[torch.ones_like(x)] + [None] * {mode.order - 1} for x in ({names},)]\n"
                f"    print(mg.forward_ad.jet(program, ({names},), one)[1])\n"
            )
        else:
            modes = f"modes=({mode.name!r},), checks=()" if mode.order < 3 else 'modes=(), checks=("third order",)'
            call = (
                f"with {self.configuration}:\n    print(mg.testing.check(program, [mg.Sample({names})], {modes}, "
                f"raise_on_failure=False))\n"
            )
        return (
            f"# program {self.number}, {mode} under {self.configuration}: {v.outcome}: {what}\n"
            f"# PyTorch: {theirs}\n{self.program.script}\n\n{call}"
        )


@dataclass
class Tally:
    """Counts of a run."""

    programs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    by_mode: dict[str, Counter[str]] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    #: what differs where the reference is not sure
    near: list[str] = field(default_factory=list)
    seconds: float = 0.0
    rejected: int = 0
    #: how often a finding that is known, or a message, came again
    repeats: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, configuration: str, v: Verdict) -> None:
        self.verdicts[v.outcome] += 1
        if v.outcome in (judge.CLOSE, judge.KINK):
            numbers = f"{v.ours:.10g}, finite differences {v.truth.value:.10g} (error {v.truth.error:.1g})"
            self.near.append(f"{v.outcome}: program {number}, {v.mode} under {configuration}: {numbers}")
        for key in (str(v.mode) if v.mode.order < 3 or v.mode.name == "jet" else "third order", configuration):
            self.by_mode.setdefault(key, Counter())[v.outcome] += 1


def run(
    seed: int,
    numbers: Iterator[int] | Sequence[int],
    *,
    until: float = float("inf"),
    configurations: Sequence[str] | None = None,
    around: Callable[[], object] = nullcontext,
    entries: Sequence[str] | None = None,
    wanted: Sequence[str] | None = None,
    all_configurations: bool = False,
    shrinking: float = 20.0,
    report: Callable[[Tally, Finding | None], None] = lambda tally, finding: None,
) -> Tally:
    """Run the programs of these numbers.

    Args:
        seed: of the programs.
        numbers: which of them.
        until: of `time.monotonic`, when no more is begun.
        configurations: overrides, by their names in `CONFIGURATIONS`; all by default. Each program has the next of them.
        around: a further context of the derivatives, as a planted fault.
        entries: of the pool, all by default.
        wanted: the entries that every program in turn has.
        all_configurations: each program under all of them.
        shrinking: seconds for each disagreement.
        report: called after each program, and with each finding.
    """
    chosen = list(configurations or CONFIGURATIONS)
    tally, start = Tally(), time.monotonic()
    try:
        for number in numbers:
            if time.monotonic() > until:
                break
            try:
                program = generate(seed, number, entries, wanted)
                subject = Subject(program)
                subject.numbers  # noqa: B018  # before any override
            except Exception as error:
                tally.rejected += 1
                tally.refusals[f"no program: {judge.said(error)}"] += 1
                continue
            tally.programs += 1
            if any(subject.settled(Mode("rev", "", k)) for k in (1, 2)):
                tally.reached.update(set(program.operators))
            for name in chosen if all_configurations else [chosen[number % len(chosen)]]:
                one(tally, number, name, subject, around, shrinking, report)
            tally.seconds = time.monotonic() - start
            report(tally, None)
    except KeyboardInterrupt:  # what is known so far is reported
        pass
    tally.seconds = time.monotonic() - start
    return tally


def one(
    tally: Tally,
    number: int,
    name: str,
    subject: Subject,
    around: Callable[[], object],
    shrinking: float,
    report: Callable[[Tally, Finding | None], None],
) -> None:
    """Judge a program under one override."""
    with CONFIGURATIONS[name](), around():  # type: ignore[attr-defined]
        found = list(judge.verdicts(subject, Random(number)))
    faults = []
    for v in found:
        if v.outcome == judge.RAISES:
            stock = stock_verdict(subject, v.mode)
            if v.mode.name != "jet" and (stock.outcome == judge.RAISES or judge.has_gap(subject.program, v.mode)):
                v = replace(v, outcome=judge.REFUSED)
        if v.outcome == judge.REFUSED:
            tally.refusals[f"{'jet' if v.mode.name == 'jet' else 'as PyTorch'}: {v.message[:160]}"] += 1
        tally.add(number, name, v)
        if v.outcome in judge.FAULTS:
            faults.append(v)
    # one of each kind of failure: the others usually have the same cause
    for v in first_of_each(faults):
        said = " ".join(v.kind[1:])
        if v.outcome == judge.RAISES and tally.repeats[said] >= 2:
            tally.repeats[said] += 1
            continue
        small = shrink(subject.program, name, v, around, time.process_time() + shrinking, tally.repeats)
        small_subject = Subject(small)
        found_again = verdict(small_subject, v, name, around) or v
        finding = Finding(number, name, found_again, small, stock_verdict(small_subject, v.mode))
        tally.repeats[said] += v.outcome == judge.RAISES
        tally.repeats[finding.key] += 1
        if tally.repeats[finding.key] == 1:
            tally.findings.append(finding)
            report(tally, finding)


def first_of_each(faults: Sequence[Verdict]) -> list[Verdict]:
    kept: dict[tuple[object, ...], Verdict] = {}
    for v in faults:
        kept.setdefault((v.mode.name == "jet", v.outcome, v.mode.order if v.mode.order < 3 else 3), v)
    lowest = {}
    for (is_jet, outcome, order), v in kept.items():
        if (is_jet, outcome) not in lowest or lowest[is_jet, outcome].mode.order > order:  # type: ignore[operator]
            lowest[is_jet, outcome] = v
    return list(lowest.values())


def stock_verdict(subject: Subject, mode: Mode) -> Verdict:
    """PyTorch's own; it has no jets."""
    if mode.name == "jet":
        return Verdict(mode, judge.RAISES, message="has no Taylor series")
    for v in judge.verdicts(subject, None, mode):
        if v.mode == mode:
            return v
    return Verdict(mode, judge.UNSETTLED)


def verdict(subject: Subject, failure: Verdict, name: str, around: Callable[[], object]) -> Verdict | None:
    """The outcome of the mode that failed."""
    if failure.outcome == judge.WRONG:
        subject.numbers  # noqa: B018  # before any override
    with CONFIGURATIONS[name](), around():  # type: ignore[attr-defined]
        for v in judge.verdicts(subject, None, failure.mode):
            if v.mode == failure.mode:
                return v
    return None


# shrinking ----------------------------------------------------------------------------------------------------------


def shrink(
    program: Program,
    name: str,
    failure: Verdict,
    around: Callable[[], object],
    deadline: float,
    known: Mapping[str, int],
) -> Program:
    """The smallest program that was found to fail in the same way before `deadline` (of `time.process_time`).

    One that is known is not made smaller.
    """
    tried: set[str] = set()

    def fails(candidate: Program) -> bool:
        key = candidate.text + " ".join(candidate.inputs)
        if key in tried or not candidate.inputs:
            return False
        tried.add(key)
        try:
            v = verdict(Subject(candidate), failure, name, around)
        except Exception:
            return False
        if v is None or v.kind != failure.kind:
            return False
        # an error that PyTorch raises too is not a fault
        return (
            v.outcome != judge.RAISES
            or v.mode.name == "jet"
            or stock_verdict(Subject(candidate), v.mode).outcome != judge.RAISES
        )

    progress = True
    while progress and not (len(program.lines) <= 2 and known.get(key_of(program, failure))):
        progress = False
        for candidate in smaller(program):
            if time.process_time() > deadline:
                return program
            if fails(candidate):
                program, progress = candidate, True
                break
    for candidate in simpler(program):
        if time.process_time() < deadline and fails(candidate):
            program = candidate
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the greatest changes first."""
    try:
        values = program.values()
    except Exception:
        return
    lines = program.lines
    if len(lines) > 1:
        for i, line in enumerate(lines):  # one line alone
            yield cut(program, values, i, line.uses, lines[i : i + 1], line.results or line.uses[:1])
    if len(program.outputs) > 1:
        for output in program.outputs:
            yield without_dead(replace(program, outputs=(output,)))
    # the end: what was computed before is returned
    for i in range(1, len(lines)):
        names = {t for line in lines[:i] for t in line.targets}
        last = [t for t in lines[i - 1].results or lines[i - 1].uses[:1] if t in names]
        if last:
            yield without_dead(replace(program, lines=lines[:i], outputs=tuple(last[:1])))
    # the start: a value becomes an input
    for i in range(len(lines) - 1, 0, -1):
        needed = tuple(u for line in lines[i:] for u in line.uses) + program.outputs
        yield cut(program, values, i, needed, lines[i:], program.outputs)
    for i in program.unused():
        yield replace(program, lines=lines[:i] + lines[i + 1 :]).pruned()
    for i in range(len(lines)):  # a line's result becomes an input
        targets = lines[i].results
        if len(targets) == 1 and torch.is_tensor(values[targets[0]]):
            inputs = {**program.inputs, targets[0]: plain(values[targets[0]])}
            yield without_dead(replace(program, inputs=inputs, lines=lines[:i] + lines[i + 1 :]))
    for x in program.inputs if len(program.inputs) > 1 else ():
        inputs = {k: v for k, v in program.inputs.items() if k != x}
        yield replace(program, inputs=inputs, constants={**program.constants, x: program.inputs[x]})


def cut(
    program: Program,
    values: dict[str, object],
    i: int,
    needed: Sequence[str],
    lines: tuple[Line, ...],
    outputs: tuple[str, ...],
) -> Program:
    """The lines from i on, with what they need as inputs."""
    made = {t for line in lines for t in line.targets}
    new = {n: values[n] for n in needed if n not in made and n not in program.constants}
    inputs = {n: plain(x) for n, x in new.items()}
    if any(line.writes for line in lines):  # an input must not be written to
        copied = [n for n in inputs if n not in program.inputs]
        inputs = {f"{n}_in" if n in copied else n: x for n, x in inputs.items()}
        lines = (*(Line((n,), "{0}.clone()", (f"{n}_in",)) for n in copied), *lines)
    return without_dead(replace(program, inputs=inputs, lines=lines, outputs=outputs))


def plain(x: torch.Tensor) -> torch.Tensor:
    return (
        x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        if x.layout is torch.strided
        else x
    )


def without_dead(program: Program) -> Program:
    """Without lines that only make what nothing uses; those that write stay."""
    while True:
        dead = [i for i in program.unused() if program.lines[i].targets and not program.lines[i].writes]
        if not dead:
            return program.pruned()
        program = replace(program, lines=tuple(x for i, x in enumerate(program.lines) if i not in dead))


def simpler(program: Program) -> Iterator[Program]:
    """The same program at rounder numbers."""
    for digits in (1, 2):
        for name, x in program.inputs.items():
            yield replace(program, inputs={**program.inputs, name: rounded(x, digits)})
        for name, x in program.constants.items():
            if torch.is_tensor(x) and x.layout is torch.strided and (x.is_floating_point() or x.is_complex()):
                yield replace(program, constants={**program.constants, name: rounded(x, digits)})


def rounded(x: torch.Tensor, digits: int) -> torch.Tensor:
    if x.layout is not torch.strided:
        return x
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    simple = torch.tensor([float(f"{v:.{digits}g}") for v in parts.reshape(-1).tolist()], dtype=parts.dtype)
    simple = simple.reshape(parts.shape)
    return torch.view_as_complex(simple) if x.is_complex() else simple
