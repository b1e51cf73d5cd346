"""The line of the user's code that made a call."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

__all__ = ["line_of"]

_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))


def line_of(node: Any) -> str:
    """The line of the user's code; in a backward, the line of the forward, which anomaly mode records."""
    if node is not None:
        while node.metadata.get("parent_") is not None:  # it was made in the backward of this one
            node = node.metadata["parent_"]
        for entry in reversed(node.metadata.get("traceback_", [])):
            if not any(package in entry for package in _PACKAGES):
                place, _, code = entry.strip().partition("\n")
                return _short(place.split('"')[1], place.split("line ")[1].split(",")[0], code.strip())
        return ""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    return _short(name, str(number), linecache.getline(name, number).strip())


def _short(file: str, number: str, code: str) -> str:
    return f"{Path(file).name}:{number}: {code}"
