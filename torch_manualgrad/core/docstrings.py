"""Docstrings of formulas, completed from the docstring of their module.

A family describes its parameters once, in the ``Args:`` section of the module's docstring. `documentation` copies the
descriptions into each formula that has such parameters and does not describe them itself. ``Note:`` and ``References:``
of the module apply to each formula without such a section. A formula without a source refers to the ATen function of
the same name.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["documentation", "entries", "section"]

_HEADING = re.compile(r"^(Args|Returns|Raises|Note|References|Example|Examples):$", re.MULTILINE)
_ENTRY = re.compile(r"    ([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*):(?: |$)")


def documentation(function: Callable[..., Any]) -> str:
    """The docstring of a formula, complete."""
    own = _own(function)
    code = inspect.unwrap(function).__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    described = {name for names, _ in entries(own) for name in names}
    missing = [name for name in parameters if name not in described]
    added = []
    for names, text in entries(_shared(function)) if missing else ():
        if wanted := [name for name in names if name in missing]:
            entry = f"    {', '.join(wanted)}: {text}"
            added.append(textwrap.fill(entry, 116, subsequent_indent=8 * " "))
    if added:
        own = _with_entries(own, added)
    if own and not section(own, "Note") and (note := section(_shared(function), "Note")):
        before, references, after = own.partition("References:\n")
        own = f"{before.rstrip()}\n\nNote:\n{note}" + (f"\n\n{references}{after}" if references else "")
    if own and not section(own, "References"):
        source = section(_shared(function), "References") or f"    ATen {function.__name__}."
        own += f"\n\nReferences:\n{source}"
    return own


def section(doc: str, name: str) -> str:
    """The lines of one Google section of a docstring, with their indentation; empty if there is no such section."""
    _, found, rest = doc.partition(f"{name}:\n")
    end = _HEADING.search(rest)
    return (rest[: end.start()] if end else rest).rstrip("\n") if found else ""


def entries(doc: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names and description of each entry of ``Args:``."""
    names: tuple[str, ...] = ()
    lines: list[str] = []
    for line in section(doc, "Args").splitlines():
        if start := _ENTRY.match(line):
            if names:
                yield names, " ".join(lines).strip()
            names, lines = tuple(n.strip() for n in start[1].split(",")), [line[start.end() :].strip()]
        elif line.startswith("     "):
            lines.append(line.strip())
    if names:
        yield names, " ".join(lines).strip()


def _with_entries(doc: str, added: list[str]) -> str:
    text = "\n".join(added)
    if existing := section(doc, "Args"):
        return doc.replace(existing, f"{existing}\n{text}", 1)
    heading = _HEADING.search(doc)
    start = heading.start() if heading else len(doc)
    before, after = doc[:start].rstrip("\n"), doc[start:]
    return f"{before}\n\nArgs:\n{text}" + (f"\n\n{after}" if after else "")


def _own(function: Callable[..., Any]) -> str:
    if function.__doc__:
        return inspect.cleandoc(function.__doc__)
    try:  # python -OO
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return ""
    return ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef) else ""


def _shared(function: Callable[..., Any]) -> str:
    module = sys.modules.get(function.__module__)
    if module is None:
        return ""
    if module.__doc__:
        return module.__doc__  # not indented
    try:  # python -OO
        return ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
    except (OSError, TypeError, SyntaxError):
        return ""
