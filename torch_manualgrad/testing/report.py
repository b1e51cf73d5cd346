"""The results of a check: one for each sample, check and engine, and a table of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

OK, WRONG, RAISES, UNSETTLED, WORKS, GAP, NOT_APPLICABLE = "ok", "wrong", "raises", "unsettled", "gap works", "gap", "-"
# the worst first: a cell of the table shows the first of these that occurs in it
_ORDER = (WRONG, RAISES, WORKS, UNSETTLED, GAP, OK, NOT_APPLICABLE)


@dataclass(frozen=True)
class Result:
    """One comparison.

    `check` is the column, `engine` the engine that ran ("eager", "func", "eager, x alone", ...). `outcome` is one of:
    ok; wrong; raises; unsettled (the finite differences do not converge, so nothing can be said at this sample); gap
    (declared, and it raises); gap works (declared, and it does not raise); - (not applicable).
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

    @property
    def failed(self) -> bool:
        return self.outcome in (WRONG, RAISES, UNSETTLED, WORKS)

    def __str__(self) -> str:
        head = f"{self.fn} {self.sample} {self.dtype}: {self.check} [{self.engine}] {self.outcome}"
        if not math.isnan(self.reference) or not math.isnan(self.ours):
            head += f": ours {self.ours:.10g}, reference {self.reference:.10g}, "
            head += f"off by {self.absolute:.3g} (relative {self.relative:.3g})"
        return f"{head}: {self.detail}" if self.detail else head


@dataclass
class Report:
    """The results of one call of `check`. Prints as a table; `bool(report)` is whether nothing failed."""

    results: list[Result] = field(default_factory=list)

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.failed]

    def outcome(self, check: str) -> str:
        """The worst outcome of one column."""
        return _worst(r.outcome for r in self.results if r.check == check)

    def __bool__(self) -> bool:
        return not self.failures

    def __add__(self, other: Report) -> Report:
        return Report(self.results + other.results)

    def __str__(self) -> str:
        columns = list(dict.fromkeys(r.check for r in self.results))
        rows: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
        for r in self.results:
            rows.setdefault((r.fn, r.sample, r.dtype), {}).setdefault(r.check, []).append(r)
        lines = [["function", "sample", "dtype", *columns]]
        for key, cells in rows.items():
            lines.append([_clip(key[0]), _clip(key[1]), key[2], *(_cell(cells.get(c, [])) for c in columns)])
        text = table(lines)
        if self.failures:
            text += "\n\n" + "\n".join(map(str, self.failures))
        return text


def table(lines: list[list[str]]) -> str:
    """An aligned Markdown table of lines, the first of which is the header."""
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
