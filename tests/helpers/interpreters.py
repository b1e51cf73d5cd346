"""Python programs, each in a process that has imported torch, and the package unless told otherwise, already.

An import of both takes longer than most programs of the tests. One process does it, and each program is a fork of that
process: nothing that a program does is left for the next. For what an import itself does, start Python as usual.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


BOTH = ("torch", "torch_manualgrad")


@functools.cache
def _prepared(imported: Sequence[str]) -> subprocess.Popen[str]:
    """The process that forks; it ends when its input does, at the latest with this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, __file__, *imported], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)
    atexit.register(process.communicate)
    return process


def run_python(
    *arguments: str | Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    imported: Sequence[str] = BOTH,
) -> subprocess.CompletedProcess[str]:
    """As ``python`` with these arguments in this folder, and with these variables besides those of the tests.

    The first argument is ``-m``, ``-c`` or a file.
    """
    command = [str(argument) for argument in arguments]
    variables = {**os.environ, **(environment or {})}
    process = _prepared(tuple(imported))
    assert process.stdin and process.stdout
    with tempfile.TemporaryDirectory() as name:
        written = [Path(name) / "out", Path(name) / "errors"]
        process.stdin.write(json.dumps([command, str(folder), variables, [str(path) for path in written]]) + "\n")
        process.stdin.flush()
        code = process.stdout.readline()
        assert code, "the process that forks has ended"
        return subprocess.CompletedProcess(command, int(code), *(path.read_text() for path in written))


def _become(command: list[str], folder: str, variables: dict[str, str], written: list[str]) -> None:
    """Turn this process into that of the program."""
    for source, target in zip([os.devnull, *written], (0, 1, 2)):
        opened = os.open(source, os.O_RDONLY if target == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, target)
        os.close(opened)
    sys.stdout.reconfigure(line_buffering=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = folder
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        exec(compile(command[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def _serve() -> list[object] | None:
    """Fork for each line of the input; the forks return what they are to become, the process itself None at the end."""
    while line := sys.stdin.readline():
        if (child := os.fork()) == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # so that no collection of the forks copies what is there already
    if request := _serve():
        _become(*request)
