"""Reports of the graphs that a program compiles, and of the parts that run uncompiled."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ..core.internals import example_of, graph_breaks

__all__ = [
    "CompiledGraph",
    "CompiledReport",
    "graphs_expected",
    "line_of",
    "note_graph",
    "note_refusal",
    "note_residuals",
    "note_run",
    "watch",
]

_here = threading.local()


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that was compiled.

    Attributes:
        line: of the program, where the graph begins.
        derivative: "values", "backward", "tangent of values", "backward of backward", ...
        operators: how many the graph has, before it is lowered.
        saved: bytes that its forward keeps for its backward, inputs included; None if its backward was never needed.
    """

    line: str
    derivative: str
    operators: int
    saved: int | None


@dataclass
class CompiledReport:
    """The findings of `watch`, complete when its block ends.

    Attributes:
        refused: the parts that run uncompiled, with the reasons.
        breaks: where Dynamo ended a graph, in its words, and how often.
    """

    refused: list[str] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    _graphs: dict[tuple[str, str], int] = field(default_factory=dict)
    _saved: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """The graphs, in the order in which they were compiled."""
        return [
            CompiledGraph(line, name, operators, self._saved.get((line, name)))
            for (line, name), operators in self._graphs.items()
        ]

    def __str__(self) -> str:
        rows = [("graph of", "derivative", "operators", "bytes saved")]
        for g in self.graphs:
            rows.append((g.line, g.derivative, str(g.operators), "" if g.saved is None else str(g.saved)))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * widths[3]))
        text = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths)) + " |" for row in rows]
        broken = [*self.refused, *(f"{reason} (graph breaks: {n})" for reason, n in self.breaks.items())]
        if broken:
            text += ["", "uncompiled:", *(f"- {reason}" for reason in broken)]
        return "\n".join(text) if self._graphs or broken else 'nothing was compiled by the backend "manualgrad"'


_reports: list[CompiledReport] = []


@contextmanager
def watch() -> Iterator[CompiledReport]:
    """Record what is compiled in a block, on all threads."""
    report, before = CompiledReport(), graph_breaks()
    _reports.append(report)
    try:
        yield report
    finally:
        _reports.remove(report)
        for reason, count in graph_breaks().items():
            first = reason.partition("\n")[0]
            if count > before.get(reason, 0) and not any(first in text for text in report.refused):
                report.breaks[first] = report.breaks.get(first, 0) + count - before.get(reason, 0)


def note_graph(line: str, name: str, graph: fx.GraphModule) -> None:
    """Record a compiled graph."""
    count = sum(n.op == "call_function" for n in graph.graph.nodes) if _reports else 0
    for report in _reports:
        report._graphs[line, _words(name)] = count


def note_residuals(line: str, name: str, residuals: Iterable[Any]) -> None:
    """Record the residuals of a function, as fake tensors."""
    size = sum(example_of(x.numel()) * x.element_size() for x in residuals if isinstance(x, Tensor)) if _reports else 0
    for report in _reports:
        report._saved[line, _words(name)] = size


def note_refusal(line: str, what: str) -> None:
    """Record a part that runs uncompiled."""
    for report in _reports:
        report.refused.append(f"{line}: {what}" if line else what)


def note_run() -> None:
    """Record that a graph runs on this thread."""
    _here.ran = True


@contextmanager
def graphs_expected(report: Callable[[str], None]) -> Iterator[None]:
    """Context manager: calls ``report`` with Dynamo's reason if it ends graphs in the block, and none runs."""
    before, around = graph_breaks(), getattr(_here, "ran", False)
    _here.ran = False
    yield
    ran, _here.ran = _here.ran, _here.ran or around
    if not ran and (reasons := [what for what, n in graph_breaks().items() if n > before.get(what, 0)]):
        report(reasons[0])


def _words(name: str) -> str:
    """``compiled_backward_jvp`` in words."""
    steps = {"backward": "backward", "jvp": "tangent", "batched": "batch"}
    found = [steps[s] for s in re.findall("backward|jvp|batched", name)]
    return " of ".join(reversed(found)) if found[:1] == ["backward"] else " of ".join([*reversed(found), "values"])


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def line_of(graph: fx.GraphModule) -> str:
    """The line of the program where one of Dynamo's graphs begins, ``train.py:12``."""
    for node in graph.graph.nodes:
        places = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
        if places:  # of the program, not of code that it calls
            path, line = next((p for p in reversed(places) if not p[0].startswith(_PACKAGE)), places[-1])
            return f"{path.rpartition('/')[2]}:{line}"
    return ""
