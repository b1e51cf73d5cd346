"""After a failure: the element with the largest error, the likely cause, and a smaller sample that fails."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ..comparison.context import Context
from ..comparison.problem import Problem
from ..comparison.report import RAISES, WRONG, Element, Result
from ..inputs.source import source
from .causes import causes
from .probe import Probe, again
from .shrinking import fails, shrink

#: The time limit for the diagnosis of all failures of one call of `check`.
SECONDS = 15.0


class Diagnosis:
    """The diagnosis of one call of `check`; each kind of failure is shrunk at the first sample that has it.

    Args:
        shrinks: whether to look for smaller samples.
    """

    def __init__(self, shrinks: bool) -> None:
        self.shrinks, self._left = shrinks, SECONDS
        self._shrunk: set[str] = set()

    def of(self, c: Context) -> list[Result]:
        """The results of a context, with the findings added to those that failed."""
        if not any(r.failed for r in c.results) or self._left <= 0:
            return c.results
        start = time.monotonic()
        try:
            return self._diagnosed(c, start + self._left)
        except Exception:
            # the failure is reported, even if the diagnosis raises
            return c.results
        finally:
            self._left -= time.monotonic() - start

    def _diagnosed(self, c: Context, deadline: float) -> list[Result]:
        probe = Probe(c, min(self._left / 2, 5.0))
        found = causes(probe if probe.inputs else self._smaller(c, deadline))
        results = [
            replace(
                r,
                element=r.element or _element(probe, r),
                causes=tuple(f.cause for f in found if f.explains(r)),
            )
            if r.failed
            else r
            for r in c.results
        ]
        return self._with_samples(c, results, deadline) if self.shrinks else results

    def _smaller(self, c: Context, deadline: float) -> Probe:
        """A probe of a smaller sample, whose elements can be inspected; of the same sample if there is no wrong result."""
        p, wrong = c.problem, next((r for r in c.results if r.outcome == WRONG), None)
        if not self.shrinks or wrong is None:
            return Probe(c)
        small = Problem(p.fn, shrink(c, wrong, deadline), readout=p.readout, outputs=p.outputs, seed=p.seed)
        results = [r for check in dict.fromkeys(r.check for r in c.results) for r in again(c, check, small)]
        return Probe(replace(c, problem=small, results=results, values={}))

    def _with_samples(self, c: Context, results: list[Result], deadline: float) -> list[Result]:
        groups: dict[str, list[int]] = {}
        for i, r in enumerate(results):
            if r.outcome in (WRONG, RAISES):
                groups.setdefault(r.causes[0].key if r.causes else r.check, []).append(i)
        for key, members in groups.items():
            if key in self._shrunk:
                continue
            self._shrunk.add(key)
            sample = shrink(c, results[members[0]], deadline)
            for i in members:
                if i == members[0] or (time.monotonic() < deadline and fails(c, results[i], sample)):
                    results[i] = replace(results[i], smallest=source(sample))
        return results


def _element(probe: Probe, r: Result) -> Element | None:
    is_number = r.outcome == WRONG and not (math.isnan(r.reference) and math.isnan(r.ours))
    return probe.element(r.check, r.engine) if is_number else None
