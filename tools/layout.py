"""Prints the tree of the package: each folder and file with the first sentence of its docstring.

Run it:  python tools/layout.py            (torch_manualgrad, csrc)
         python tools/layout.py tests      (or any other folder)
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("torch_manualgrad", "csrc")
SOURCES = {".py", ".h", ".cpp", ".cu"}
WIDTH = 160


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, or of the comment that a C++ file begins with."""
    text = path.read_text()
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = " ".join(line.removeprefix("//").strip() for line in re.match(r"(//.*\n)*", text)[0].splitlines())  # type: ignore[index]
    return re.split(r"\.(?=\s|$)|\n\n|:(?=\s{2})", said, maxsplit=1)[0].replace("\n", " ")


def lines(folder: Path, indent: int = 0) -> Iterator[str]:
    """Of a folder: itself, its files, its folders; those without sources are left out."""
    if not any(path.suffix in SOURCES for path in folder.rglob("*")):
        return
    init = folder / "__init__.py"
    yield _line(indent, f"{folder.name}/", summary(init) if init.exists() else "")
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SOURCES and path != init:
            yield _line(indent + 1, path.name, summary(path))
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith(("_", ".")):
            yield from lines(path, indent + 1)


def _line(indent: int, name: str, said: str) -> str:
    return f"{'  ' * indent}{name:<{38 - 2 * indent}}{said}".rstrip()[:WIDTH]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    for name in parser.parse_args(arguments).folders:
        folder = ROOT / name
        if not folder.is_dir():
            parser.error(f"{name!r} is not a folder of this project")
        print("\n".join(lines(folder)))


if __name__ == "__main__":
    main()
