"""Docstrings as Markdown with typeset mathematics."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from typeset import MARK, typeset

__all__ = ["blocks", "is_display", "markdown", "sections", "title"]

HEADING = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Note|References|Example|Examples):$")


def sections(docstring: str) -> dict[str, str]:
    """The text before the Google sections, under "", and the text of each section."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if match := HEADING.match(line):
            name = match[1]
            found[name] = []
        else:
            found[name].append(line if name == "" else line.removeprefix("    "))
    return {name: "\n".join(lines).strip("\n") for name, lines in found.items()}


def title(docstring: str) -> str:
    """The summary of a docstring as a heading, which has no full stop."""
    return typeset(inspect.cleandoc(docstring).partition("\n")[0].rstrip(".:"))


def markdown(text: str) -> str:
    """Paragraphs, lists and displayed formulas as Markdown.

    A displayed formula is indented by four. It is mathematics as a whole, unless something in it is marked.
    """
    return "\n\n".join(_block(lines) for lines in blocks(text))


def blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines that are not empty, and that are all indented, or all not."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if block and (not line.strip() or line.startswith("    ") != block[0].startswith("    ")):
            yield block
            block = []
        if line.strip():
            block.append(line)


def is_display(block: list[str]) -> bool:
    return block[0].startswith("    ") and not block[0].lstrip().startswith("- ")


def _block(lines: list[str]) -> str:
    if is_display(lines):
        whole = MARK not in "".join(lines)
        shown = "<br>\n".join(_columns(line, whole) for line in lines)
        return f'<div class="display" markdown="span">{shown}</div>'
    items: list[str] = []
    for line in lines:
        if line.lstrip().startswith("- ") or not items:
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    if len(items) == 1:
        return typeset(items[0])
    return "\n".join(
        f"- {typeset(i.lstrip()[2:])}" if i.lstrip().startswith("- ") else typeset(i) + "\n" for i in items
    )


def _columns(line: str, whole: bool) -> str:
    """One line of a displayed formula, all of it mathematics or as marked; its columns keep their distance."""
    parts = re.split(r"(\s{2,})", line.strip())
    return "".join(_column(part, whole) if part.strip() else "&emsp;" * min(len(part) - 1, 2) for part in parts)


def _column(part: str, whole: bool) -> str:
    formula, end = re.fullmatch(r"(.*?)([.,;:]?)", part).groups()  # type: ignore[union-attr]
    return typeset(MARK + formula + MARK if whole else formula) + end
