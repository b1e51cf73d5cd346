"""`audit`: run a user's script unchanged, and list the operators that it differentiates, or the graphs that it compiles."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .. import testing
from .answer import Answer, Lines
from .targets import Unknown

__all__ = ["audit"]


def audit(script: str, arguments: Sequence[str], *, compiled: bool = False) -> Answer:
    """A file, or the name of a module, as ``__main__``; status 1 if an operator is doubtful, or something is not compiled."""
    if not compiled:
        with testing.audit() as report:
            _run(script, arguments)
        operators = [asdict(d) for d in report.operators]
        return Answer([Lines("operators", str(report), operators)], int(bool(report.doubtful)))
    from ..compiling.watching import watch  # here, as it imports Dynamo

    with watch() as graphs:
        _run(script, arguments)
    data = {"graphs": [asdict(g) for g in graphs.graphs], "refused": graphs.refused, "breaks": graphs.breaks}
    return Answer([Lines("compiled", str(graphs), data)], int(bool(graphs.refused or graphs.breaks)))


def _run(script: str, arguments: Sequence[str]) -> None:
    if script.endswith(".py") and not Path(script).exists():
        raise Unknown(f"there is no file {script}")
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent if script.endswith(".py") else Path.cwd()))
    try:
        if script.endswith(".py"):
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if error.name is None and script in str(error):
            raise Unknown(f"there is no module {script!r}") from None
        raise
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:] = before
