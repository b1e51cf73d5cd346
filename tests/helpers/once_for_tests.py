"""What is costly and the same for all of pytest's processes is done by one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[Path], None]) -> Path:
    """The folder that ``work`` was given, by the first process that asked; it fails for all if it failed for one."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # where each process has a folder of its own
        shared = shared.parent
    folder, outcome = shared / name, shared / f"{name}.outcome"
    with FileLock(shared / f"{name}.lock"):
        if not outcome.exists():
            folder.mkdir()
            try:
                work(folder)
                outcome.write_text("")
            except Exception as error:
                outcome.write_text(str(error) or repr(error))
    assert not outcome.read_text(), outcome.read_text()
    return folder
