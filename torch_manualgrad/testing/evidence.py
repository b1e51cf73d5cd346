"""The results of one sample, as evidence of what is at fault."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from .arithmetic import widen
from .probe import Probe
from .report import OK, RAISES, WRONG, Result

#: Keys of causes, with a sentence and with the columns whose failures they explain.
Said = Iterator[tuple[str, str, tuple[str, ...]]]


class Evidence:
    """The results of one sample, by column."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.p = probe, probe.p
        self.results = probe.c.results

    def of(self, check: str, engine: str = "") -> list[Result]:
        return [r for r in self.results if r.check == check and r.engine.startswith(engine)]

    def right(self, *checks: str) -> bool:
        """Whether each is right in an engine, and not wrong in one; an engine that raises says nothing."""
        outcomes = [{r.outcome for r in self.of(c)} for c in checks]
        return all(OK in found and found <= {OK, RAISES} for found in outcomes)

    def finitely_wrong(self, *checks: str) -> bool:
        """Whether one of them is a wrong finite number."""
        return any(r.outcome == WRONG and math.isfinite(r.ours) for c in checks for r in self.of(c))

    def wrong_engine(self, check: str) -> str:
        """The engine whose joint derivative is wrong; empty if none is."""
        return next((r.engine for r in self.of(check) if r.outcome == WRONG and r.engine in ("eager", "func")), "")

    def close(self, a: Tensor, b: Tensor) -> bool:
        relative, absolute = self.probe.c.tolerance.first
        limit = 10 * (relative * max(largest(a), largest(b)) + absolute)
        return a.shape == b.shape and largest(a - b) <= limit


def largest(x: Tensor) -> float:
    return float(widen(x).abs().max()) if x.numel() else 0.0
