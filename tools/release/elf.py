"""The symbols of shared libraries, as `nm` lists them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path


def _symbols(path: Path) -> Iterator[tuple[str, str, str]]:
    """(kind, name, version) of each dynamic symbol."""
    table = subprocess.run(["nm", "-D", str(path)], check=True, capture_output=True, text=True).stdout
    for line in table.splitlines():
        kind, name = line.split()[-2:]
        name, _, version = name.partition("@")
        yield kind, name, version.lstrip("@")


def defined(path: Path) -> set[str]:
    """Names that a library gives to others."""
    return {name for kind, name, _ in _symbols(path) if kind not in "Uwv"}


def foreign(path: Path) -> set[str]:
    """Names that a library takes from others and that have no version: not of glibc, libstdc++ or libgcc; weak ones may be absent."""
    return {name for kind, name, version in _symbols(path) if kind == "U" and not version}
