"""The answer of a command: named parts, printed for people or as one JSON document."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.syntax import Syntax
from rich.table import Table as RichTable

from ..testing.comparison.report import table

__all__ = ["Answer", "Fields", "Lines", "Part", "Source", "Table"]


@dataclass(frozen=True)
class Table:
    """Lines of cells below a header; a list of objects in JSON."""

    name: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]

    def data(self) -> Any:
        return [dict(zip(self.header, line, strict=True)) for line in self.lines]

    def shown(self) -> RenderableType:
        shown = RichTable(box=SIMPLE_HEAD)
        for title in self.header:
            shown.add_column(title, overflow="fold")
        for line in self.lines:
            shown.add_row(*map(_plain, line))
        return shown

    def text(self) -> str:
        return table([[*self.header], *map(list, self.lines)])


@dataclass(frozen=True)
class Fields:
    """Names with a value each; an object in JSON. A name that comes several times has a list of values there."""

    name: str
    pairs: Sequence[tuple[str, str]]

    def data(self) -> Any:
        values: dict[str, list[str]] = {}
        for key, value in self.pairs:
            values.setdefault(key, []).append(value)
        return {key: found[0] if len(found) == 1 else found for key, found in values.items()}

    def shown(self) -> RenderableType:
        grid = RichTable.grid(padding=(0, 2))
        for key, value in self.pairs:
            grid.add_row(f"[bold]{_plain(key)}", _plain(value))
        return grid

    def text(self) -> str:
        width = max((len(key) for key, _ in self.pairs), default=0)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.pairs)


@dataclass(frozen=True)
class Source:
    """Python source text."""

    name: str
    source: str

    def data(self) -> Any:
        return self.source

    def shown(self) -> RenderableType:
        return Syntax(self.source, "python", theme="ansi_dark", background_color="default")

    def text(self) -> str:
        return self.source


@dataclass(frozen=True)
class Lines:
    """Text as it is for people, and any data in JSON."""

    name: str
    printed: str
    value: Any

    def data(self) -> Any:
        return self.value

    def shown(self) -> RenderableType:
        return _plain(self.printed)

    def text(self) -> str:
        return self.printed


Part = Table | Fields | Source | Lines


@dataclass(frozen=True)
class Answer:
    """The parts in their order, and the exit status."""

    parts: Sequence[Part]
    status: int = 0

    def print(self, *, as_json: bool = False) -> None:
        """To standard output: coloured tables to a terminal, Markdown to anything else."""
        if as_json:
            print(json.dumps({part.name: _finite(part.data()) for part in self.parts}, indent=2))
        elif sys.stdout.isatty():
            console = Console()
            for part in self.parts:
                console.print(part.shown())
        else:
            print("\n\n".join(part.text() for part in self.parts))


def _plain(text: str) -> str:
    """Without meaning to rich, which reads brackets."""
    return text.replace("[", "\\[")


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null, and a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value
