"""Processes of the tests: forked ranks of a process group, and work that one of pytest's processes does for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]


def run_program(path: Path, *arguments: object) -> None:
    """Run a program that forks ranks, in a new process, which has no threads; when it ends, so do they."""
    paths = [str(ROOT), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        try:
            failed = running.wait(timeout=500)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        errors.seek(0)
        assert not failed, errors.read()


def forked(functions: Sequence[Callable[[], object]]) -> None:
    """Call each function in its own process, concurrently; the first that fails ends this program."""
    for function in functions:
        if os.fork() == 0:
            _call(function)
    for _ in functions:
        _, status = os.wait()
        if status:
            sys.exit(1)


def _call(function: Callable[[], object]) -> None:
    """Call it and end this process."""
    failed = 1
    try:
        function()
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(failed)


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
