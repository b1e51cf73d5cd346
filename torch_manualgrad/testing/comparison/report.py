"""The results of a check: one for each sample, check and engine, and a table of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any
from xml.etree import ElementTree

OK, WRONG, RAISES, UNSETTLED, WORKS, GAP, NOT_APPLICABLE = "ok", "wrong", "raises", "unsettled", "gap works", "gap", "-"
KINK = "not differentiable"
# the worst first: a cell of the table shows the first of these that occurs in it
_ORDER = (WRONG, RAISES, WORKS, UNSETTLED, GAP, KINK, OK, NOT_APPLICABLE)
_FAILED = (WRONG, RAISES, UNSETTLED, WORKS)


@dataclass(frozen=True)
class Element:
    """The element in which a wrong result differs most.

    Attributes:
        at: an element of an input, ``args[0][1, 2]``, or of a tensor that is compared, ``gradient of args[0][1, 2]``.
        of: what is differentiated with respect to that element: an element of an output, or the loss; empty if nothing is.
        ours: the derivative, or the element itself.
        reference: the same from finite differences, or from the reference tensor.
    """

    at: str
    of: str
    ours: float
    reference: float

    def __str__(self) -> str:
        what = f"d {self.of} / d {self.at}" if self.of else self.at
        return f"{what}: found {self.ours:.6g}, reference {self.reference:.6g}"


@dataclass(frozen=True)
class Cause:
    """A likely cause: one of `causes.KEYS`, and a sentence."""

    key: str
    text: str


@dataclass(frozen=True)
class Result:
    """One comparison.

    `check` is the column, `engine` the engine that ran ("eager", "func", "eager, x alone", ...). `outcome` is one of:
    ok; wrong; raises; unsettled (the finite differences do not converge, so nothing can be said at this sample); not
    differentiable (a kink, and the value is not certainly wrong); gap (declared, and it raises); gap works (declared,
    and it does not raise); - (not applicable). For a failure, `element` is the element that differs most, `causes` are the
    likely causes, and `smallest` is a small sample, as Python code, that fails in the same way; each only if it was found.
    """

    fn: str
    sample: str
    dtype: str
    check: str
    engine: str
    outcome: str
    ours: float = math.nan
    reference: float = math.nan
    absolute: float = math.nan
    relative: float = math.nan
    detail: str = ""
    element: Element | None = None
    causes: tuple[Cause, ...] = ()
    smallest: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in _FAILED

    @property
    def id(self) -> str:
        """``fn[sample]::check[engine]``: the same in each run."""
        engine = f"[{self.engine}]" if self.engine else ""
        return f"{self.fn}[{self.sample}]::{self.check}{engine}"

    @property
    def verdict(self) -> str:
        """The outcome, both numbers, and where they differ most."""
        said = self.outcome
        if not math.isnan(self.reference) or not math.isnan(self.ours):
            said += f": found {self.ours:.10g}, reference {self.reference:.10g}, "
            said += f"off by {self.absolute:.3g} (relative {self.relative:.3g})"
        said = f"{said}: {self.detail}" if self.detail else said
        return f"{said}\n    {self.element}" if self.element else said

    def __str__(self) -> str:
        return f"{self.fn} {self.sample} {self.dtype}: {self.check} [{self.engine}] {self.verdict}"


@dataclass
class Report:
    """The results of one call of `check`. Prints as a table; `bool(report)` is whether nothing failed."""

    results: list[Result] = field(default_factory=list)

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.failed]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def causes(self) -> list[Cause]:
        """The likely causes."""
        return list(dict.fromkeys(cause for r in self.results for cause in r.causes))

    def outcome(self, check: str) -> str:
        """The worst outcome of one column."""
        return _worst(r.outcome for r in self.results if r.check == check)

    def __bool__(self) -> bool:
        return self.ok

    def __add__(self, other: Report) -> Report:
        return Report(self.results + other.results)

    def lines(self) -> list[list[str]]:
        """The table: a header, then a line for each sample."""
        columns = list(dict.fromkeys(r.check for r in self.results))
        rows: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
        for r in self.results:
            rows.setdefault((r.fn, r.sample, r.dtype), {}).setdefault(r.check, []).append(r)
        lines = [["function", "sample", "dtype", *columns]]
        for key, cells in rows.items():
            lines.append([_clip(key[0]), _clip(key[1]), key[2], *(_cell(cells.get(c, [])) for c in columns)])
        return lines

    def findings(self) -> list[str]:
        """The failures, with equal ones merged, then the likely causes, then small samples that fail."""
        verdicts: dict[tuple[str, ...], list[str]] = {}
        causes: dict[str, list[str]] = {}
        samples: dict[str, list[str]] = {}
        for r in self.failures:
            verdicts.setdefault((r.fn, r.sample, r.dtype, r.verdict), []).append(f"{r.check} [{r.engine}]")
            for cause in r.causes:
                causes.setdefault(cause.text, []).append(r.check)
            if r.smallest:
                samples.setdefault(r.smallest, []).append(r.check)
        said = [
            # one wrong formula, or one error, shows in many ways
            f"{fn} {sample} {dtype}: {', '.join(dict.fromkeys(where))} {verdict}"
            for (fn, sample, dtype, verdict), where in verdicts.items()
        ]
        for title, found in (("likely cause", causes), ("smallest failing sample", samples)):
            said += [f"{title} ({', '.join(dict.fromkeys(where))}): {text}" for text, where in found.items()]
        return said

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [table(self.lines()), "\n".join(self.findings())]))

    # for programs ----------------------------------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """The ids of the results; of two equal ids, the second ends with ``#2``."""
        seen: Counter[str] = Counter()
        found = []
        for r in self.results:
            seen[r.id] += 1
            found.append(r.id if seen[r.id] == 1 else f"{r.id}#{seen[r.id]}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """``{"ok": ..., "results": [...]}``, each result with its ``id`` and its attributes by name.

        A nan becomes None, and an infinite number becomes a string, as JSON has neither.
        """
        results = [{"id": i, **_to_json(asdict(r))} for i, r in zip(self.ids(), self.results, strict=True)]
        return {"ok": self.ok, "results": results}

    def to_json(self, indent: int | None = 2) -> str:
        """`as_dict` as text; `from_json` reads it."""
        return json.dumps(self.as_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report from the text that `to_json` returns."""
        return cls([_from_json(given) for given in json.loads(text)["results"]])

    def to_junit(self, path: str | PathLike[str]) -> None:
        """Write a JUnit file: a test case for each result, named by its id."""
        suite = ElementTree.Element("testsuite", name="derivatives", tests=str(len(self.results)))
        counts = Counter({"failures": 0, "errors": 0, "skipped": 0})
        for i, r in zip(self.ids(), self.results, strict=True):
            case = ElementTree.SubElement(suite, "testcase", classname=_printable(r.fn), name=_printable(i))
            if r.outcome != OK:
                kind = ("error" if r.outcome == RAISES else "failure") if r.failed else "skipped"
                counts["skipped" if kind == "skipped" else f"{kind}s"] += 1
                text = ElementTree.SubElement(case, kind, message=_printable(r.detail or r.outcome))
                text.text = _printable("\n".join(Report([r]).findings())) if r.failed else None
        suite.attrib.update({key: str(n) for key, n in counts.items()})
        suites = ElementTree.Element("testsuites")
        suites.append(suite)
        ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def table(lines: list[list[str]]) -> str:
    """An aligned Markdown table; the first line is the header."""
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    text.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(text)


def _worst(outcomes: Iterable[str]) -> str:
    return min(outcomes, key=_ORDER.index, default=NOT_APPLICABLE)


def _cell(results: list[Result]) -> str:
    outcome = _worst(r.outcome for r in results)
    here = {r.engine.split(",")[0] for r in results if r.outcome == outcome}
    everywhere = {r.engine.split(",")[0] for r in results}
    # the engine that fails is named only if another one does not
    return f"{outcome} ({', '.join(sorted(here))})" if here != everywhere and outcome != OK else outcome


def _clip(text: str, width: int = 48) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_to_json(v) for v in value]
    return {key: _to_json(v) for key, v in value.items()} if isinstance(value, dict) else value


def _from_json(given: dict[str, Any]) -> Result:
    values = {f.name: given[f.name] for f in fields(Result)}
    for name in ("ours", "reference", "absolute", "relative"):
        values[name] = _number(values[name])
    if element := values["element"]:
        numbers = {name: _number(element[name]) for name in ("ours", "reference")}
        values["element"] = Element(element["at"], element["of"], **numbers)
    values["causes"] = tuple(Cause(**cause) for cause in values["causes"])
    return Result(**values)


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _printable(text: str) -> str:
    """XML has no control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
