"""Notebooks as pages: the build runs each cell, and its output and figures follow it."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import figures
import jupytext
from matplotlib import pyplot

__all__ = ["SOURCES", "drawn", "ipynb", "page"]

SOURCES = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.py"))
# For a look at the text alone: DOCS_RUN_NOTEBOOKS=0
RUN = os.environ.get("DOCS_RUN_NOTEBOOKS", "1") != "0"
# The figures that were drawn, by the names under which the pages have them.
drawn: dict[str, str] = {}


def ipynb(source: Path) -> str:
    """The notebook to be downloaded, without outputs."""
    return jupytext.writes(jupytext.read(source), fmt="ipynb")


def page(source: Path) -> str:
    """The Markdown of a notebook."""
    return "\n\n".join(_parts(source)) + "\n"


def _parts(source: Path) -> Iterator[str]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    first = True
    for number, cell in enumerate(jupytext.read(source).cells):
        if cell.cell_type == "markdown":
            yield cell.source
            if first:
                yield f"[Download as a notebook]({source.stem}.ipynb){{ download }}"
                first = False
            continue
        yield f"```python\n{cell.source}\n```"
        if RUN:
            yield from _outputs(cell.source, f"{source.stem}, cell {number}", namespace)


def _outputs(code: str, name: str, namespace: dict[str, Any]) -> Iterator[str]:
    """Run one cell; what it printed, and where its figures go."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for readers of the source line
    printed, shown = io.StringIO(), []

    def show() -> None:
        shown.append(pyplot.gcf())

    pyplot.close("all")
    with mock.patch.object(pyplot, "show", show), contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    if text := printed.getvalue().rstrip():
        yield f"```{{ .text .output }}\n{text}\n```"
    for canvas in shown:
        key = f"drawn_{len(drawn)}"
        drawn[key] = f'<figure class="drawn">{figures.svg(canvas, key)}</figure>'
        yield f"<!-- figure: {key} -->"
