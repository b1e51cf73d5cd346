"""Docstrings as Markdown with typeset mathematics."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from typeset import typeset

__all__ = ["markdown", "sections", "title"]

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
    """Paragraphs, lists and displayed formulas (which are indented by four) as Markdown."""
    return "\n\n".join(_block(lines) for lines in _blocks(text))


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines that are not empty, and that are all indented, or all not."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if block and (not line.strip() or line.startswith("    ") != block[0].startswith("    ")):
            yield block
            block = []
        if line.strip():
            block.append(line)


def _block(lines: list[str]) -> str:
    if lines[0].startswith("    ") and not lines[0].lstrip().startswith("- "):
        return '<div class="display" markdown="span">' + "<br>\n".join(map(_columns, lines)) + "</div>"
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


def _columns(line: str) -> str:
    """One line of a displayed formula; its columns keep their distance."""
    return "&emsp;&emsp;".join(typeset(part) for part in re.split(r"\s{3,}", line.strip()))
