"""The version of a release: declared in pyproject.toml, and that of the tag. Without the tag it is none to upload."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def declared(root: Path = ROOT) -> str:
    """The version in pyproject.toml."""
    found = re.search(r'^version = "(.+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def label(root: Path = ROOT) -> str:
    """The suffix of the version: nothing on a clean checkout of its tag, or without git; else the commit.

    Such a local version, 0.1.0+g1a2b3c4, is refused by every package index.

    Raises:
        SystemExit: the tag of the commit is that of another version.
    """
    if not (root / ".git").exists():
        return ""
    tags = [tag for tag in _git(root, "tag", "--points-at", "HEAD").split() if re.match(r"v\d", tag)]
    if tags and f"v{declared(root)}" not in tags:
        raise SystemExit(f"torch_manualgrad: the tag is {' '.join(tags)}, and pyproject.toml says {declared(root)}")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if tags and not changed:
        return ""
    return f"+g{_git(root, 'rev-parse', '--short=8', 'HEAD')}{'.changed' if changed else ''}"
