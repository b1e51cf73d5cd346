"""`check` and `composition`: a rule or an operator of the user's through the checker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import track
from rich.table import Table as RichTable

from .. import testing
from ..core.override.override import override
from ..core.rule import Rule
from ..testing.checks.table import FAST_CHECKS, FAST_MODES
from ..testing.comparison import report
from .answer import Answer, Lines
from .targets import Unknown, as_samples, load, named_samples, own_samples, rules_of

__all__ = ["check", "composition", "progress"]

T = TypeVar("T")


@dataclass(frozen=True)
class Results(Lines):
    """The report of `check`; on a terminal the outcomes have colours."""

    report: testing.Report

    def shown(self) -> RenderableType:
        table = RichTable(box=SIMPLE_HEAD)
        header, *lines = self.report.lines()
        for title in (*header[:3], "outcomes"):
            table.add_column(title, overflow="fold")
        for line in lines:
            # the columns by outcome: side by side they are wider than a terminal
            outcomes: dict[str, list[str]] = {}
            for title, cell in zip(header[3:], line[3:], strict=True):
                outcomes.setdefault(cell, []).append(title)
            said = [f"[{_colour(cell)}]{escape(cell)}[/]: {', '.join(which)}" for cell, which in outcomes.items()]
            table.add_row(*map(escape, line[:3]), "\n".join(said))
        return Group(table, "\n".join(map(escape, (*self.report.findings(), _summary(self.report)))))


def _colour(cell: str) -> str:
    bad = cell.split(" (")[0] in (report.WRONG, report.RAISES, report.UNSETTLED, report.WORKS)
    return "red" if bad else "green" if cell == report.OK else "dim"


def _summary(found: testing.Report) -> str:
    return f"{len(found.results)} comparisons, {len(found.failures)} failed"


def check(
    target: str,
    samples: str | None,
    *,
    dtype: str,
    device: str,
    modes: str | None,
    checks: str | None,
    fast: bool = False,
    junit: str | None = None,
) -> Answer:
    """Every mode and every check; status 1 if something failed."""
    chosen: dict[str, Any] = {"modes": FAST_MODES, "checks": FAST_CHECKS} if fast else {}
    for key, given, known in (("modes", modes, testing.MODES), ("checks", checks, testing.ALL_CHECKS)):
        if given is not None:
            chosen[key] = given.split(",")
            for name in chosen[key]:
                if name not in known:
                    raise Unknown(f"there is no {key[:-1]} {name!r}; expected some of {','.join(known)}")
    given_samples = named_samples(samples) if samples else None
    found = testing.Report()
    if "::" in target or ":" not in target:
        rules = rules_of(target)
    else:
        module, op = load(target)
        rules = [op] if isinstance(op, Rule) else []
        if not rules:
            if not callable(op):
                raise Unknown(f"{target} is a {type(op).__name__}, not an operator, a function or a rule")
            if given_samples is None and not hasattr(module, "samples"):
                raise Unknown(f"{module.__name__} has no `samples`; name some with --samples MODULE:NAME")
            for sample in progress(given_samples or as_samples(module.samples, "samples")):
                found += testing.check(op, [sample], raise_on_failure=False, **chosen)
    for rule in rules:
        about = {"name": rule.name, "gaps": rule.gaps, "raise_on_failure": False, **chosen}
        with override(rule):
            for sample in progress(given_samples or own_samples(rule, dtype, device), rule.name):
                found += testing.check(rule.probe, [sample], **about)
    if junit is not None:
        found.to_junit(junit)
    printed = f"{found}\n\n{_summary(found)}"
    return Answer([Results("results", printed, found.as_dict()["results"], found)], 0 if found else 1)


def composition(target: str, reference: str, samples: str | None, *, compile: bool) -> Answer:
    """An operator in every transform and engine; status 1 if something failed."""
    _, fn = load(target)
    _, plain = load(reference)
    sample = named_samples(samples or f"{target.rpartition(':')[0]}:samples")[0]
    found = testing.composition(fn, plain, sample, compile=compile)
    return Answer([Lines("rows", str(found), [asdict(row) for row in found])], 1 if found.failures else 0)


def progress(items: Iterable[T], what: str = "samples") -> Iterable[T]:
    """The items, with a progress bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)
