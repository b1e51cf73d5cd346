"""Writes the marks of mathematics into docstrings: ``python tools/site/mark.py FILE...``.

Marks a paragraph where `typeset` guesses mathematics in it, and leaves sections that are data: ``Args`` declares shapes,
``References`` and ``Raises`` have none. The docstrings' lines may become longer than the limit, which `ruff` reports.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from textwrap import indent

from docstrings import HEADING
from typeset import marked

UNMARKED = ("Args", "Attributes", "Raises", "References", "Example", "Examples")


def mark(docstring: str) -> str:
    """The docstring with marks, paragraph by paragraph, as `docstrings.markdown` typesets it."""
    out: list[str] = []
    paragraph: list[str] = []
    section = ""

    def end() -> None:
        if paragraph:
            text = "\n".join(paragraph)
            out.append(text if section in UNMARKED else marked(text))
            paragraph.clear()

    for line in inspect.cleandoc(docstring).split("\n"):
        heading = HEADING.match(line)
        inner = line.removeprefix("    ") if section else line
        displayed = inner.startswith("    ") and not inner.lstrip().startswith("- ")
        if not line.strip() or heading or displayed or inner.lstrip().startswith("- "):
            end()
        if heading:
            section = heading[1]
        if not line.strip() or heading or (displayed and section in UNMARKED):
            out.append(line)
        elif displayed:
            out.append("".join(part if part.isspace() else marked(part) for part in re.split(r"(\s{3,}|^\s+)", line)))
        else:
            paragraph.append(line)
    end()
    return "\n".join(out)


def write(path: Path) -> None:
    """Marks the docstrings of a file's functions and classes."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            source = ast.get_source_segment(text, node.body[0])
            if source and (found := re.fullmatch(r'(r?""")(.*)(""")', source, re.DOTALL)):
                first, _, rest = mark(found[2]).partition("\n")
                margin = " " * node.body[0].col_offset
                text = text.replace(source, found[1] + first + "\n" * bool(rest) + indent(rest, margin) + found[3])
    path.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
