"""Hooks of MkDocs: generated pages, figures, the public API, and mathematics as MathML."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import catalogue
import notebooks
import ziamath
from api import public
from figures import figure
from mkdocs.structure.files import File
from presentation import mathml

FONT = Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"
MATHEMATICS = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)
IN_TITLE = re.compile(r"\\\((.*?)\\\)")  # the table of contents has the text of headings
FIGURE = re.compile(r"<!-- figure: (\w+) -->")
API = re.compile(r"<!-- api: ([\w.]+)((?: \w+)*) -->")
MEASURED = (
    Path(__file__).resolve().parents[2] / "build" / "measure"
)  # by `make measure`, `make mutants` and `make conformance`
DUNDER = re.compile(r"(?<![`\w.])__(\w+)__(?![`\w])")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are written from the registries and notebooks, and the font of the mathematics."""
    for place, text in catalogue.pages().items():
        files.append(File.generated(config, place, content=text))
    for source in notebooks.SOURCES:
        files.append(File.generated(config, f"notebooks/{source.stem}.md", content=notebooks.page(source)))
        files.append(File.generated(config, f"notebooks/{source.stem}.ipynb", content=notebooks.ipynb(source)))
    for whole in sorted(MEASURED.glob("*.*")):
        files.append(File.generated(config, f"measured/{whole.name}", content=whole.read_text()))
    files.append(File.generated(config, "assets/mathematics.ttf", content=FONT.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the public API for mkdocstrings, and link whole tables.

    ``<!-- api: torch_manualgrad install active -->`` is these two; without names, the module's others.
    """
    markdown = as_on_github(markdown)
    if "/" not in page.file.src_uri:
        wholes = sorted(MEASURED.glob(f"{Path(page.file.src_uri).stem}.*"))
        markdown += "".join(f"\nThe whole table: [{w.name}](measured/{w.name}).\n" for w in wholes)
    shown: set[str] = set()

    def entries(match: re.Match[str]) -> str:
        places = {place.rpartition(".")[2]: place for place in public(match[1])}
        chosen = match[2].split() or [name for name in places if name not in shown]
        shown.update(chosen)
        level = "\n    options:\n      heading_level: 3" if match[2] else ""
        return "\n\n".join(f"::: {places[name]}{level}" for name in chosen)

    return API.sub(entries, markdown)


def as_on_github(markdown: str) -> str:
    """A list needs no empty line before it, and ``__radd__`` is a name."""
    lines: list[str] = []
    inside = False
    for line in markdown.splitlines():
        inside ^= line.lstrip().startswith("```")
        if not inside:
            line = DUNDER.sub(r"\\_\\_\1\\_\\_", line)
            if line.startswith("- ") and lines and lines[-1] and not lines[-1].startswith(("- ", " ", "#", "```")):
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Typeset the mathematics, for which browsers need no script, and draw the figures."""

    def typeset(match: re.Match[str]) -> str:
        return mathml(html.unescape(match[2]), "block" if match[1] == "div" else "inline")

    content = MATHEMATICS.sub(typeset, content)
    headings = [*page.toc.items]
    while headings:
        heading = headings.pop()
        heading.title = IN_TITLE.sub(lambda match: mathml(html.unescape(match[1])), heading.title)
        headings += heading.children
    return FIGURE.sub(lambda match: notebooks.drawn.get(match[1]) or figure(match[1]), content)
