"""The processes of a process group, forked: they start with all that their parent has imported."""

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

ROOT = Path(__file__).parents[2]


def run_program(path: Path, *arguments: object) -> None:
    """Run a program that forks ranks, in a new process, which has no threads; when it ends, so do they."""
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
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
    """Call each function in a process of its own, beside each other; the first that fails ends this program."""
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
