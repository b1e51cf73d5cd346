"""`check` and `composition`: a rule or an operator of the user's through the checker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from .. import testing
from ..core.override import override
from ..core.rule import Rule
from ..core.sample import Sample
from .answer import Answer, Lines
from .targets import Unknown, as_samples, load, named_samples, own_samples, rules_of

__all__ = ["check", "composition", "progress"]

T = TypeVar("T")


def check(
    target: str, samples: str | None, *, dtype: str, device: str, modes: str | None, checks: str | None
) -> Answer:
    """Every mode and every check; status 1 if something failed."""
    chosen: dict[str, Any] = {}
    for key, given, known in (("modes", modes, testing.MODES), ("checks", checks, testing.ALL_CHECKS)):
        if given is not None:
            chosen[key] = given.split(",")
            for name in chosen[key]:
                if name not in known:
                    raise Unknown(f"there is no {key[:-1]} {name!r}; expected some of {','.join(known)}")
    given_samples = named_samples(samples) if samples else None
    report = testing.Report()
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
                report += testing.check(op, [sample], raise_on_failure=False, **chosen)
    for rule in rules:
        found = given_samples or own_samples(rule, dtype, device)
        about = {"name": rule.name, "gaps": rule.gaps, "raise_on_failure": False, **chosen}
        with override(rule):
            for sample in progress(found, rule.name):
                report += testing.check(rule.probe, [sample], **about)
    lines = f"{report}\n\n{len(report.results)} comparisons, {len(report.failures)} failed"
    return Answer([Lines("results", lines, [asdict(result) for result in report.results])], 0 if report else 1)


def composition(target: str, reference: str, samples: str | None, *, compile: bool) -> Answer:
    """An operator in every transform and engine; status 1 if something failed."""
    _, fn = load(target)
    _, plain = load(reference)
    sample: Sample | tuple[Any, ...] = named_samples(samples or f"{target.rpartition(':')[0]}:samples")[0]
    found = testing.composition(fn, plain, sample, compile=compile)
    return Answer([Lines("rows", str(found), [asdict(row) for row in found])], 1 if found.failures else 0)


def progress(items: Iterable[T], what: str = "samples") -> Iterable[T]:
    """The items, with a progress bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)
