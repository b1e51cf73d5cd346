"""PyTorch's whole operator database in six modes, on PyTorch and on this package: right, wrong, or an error.

Each operator runs in its own process: if it ends the process, it counts as one that raises.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...core.override.override import override
from ..checking.check import check
from ..comparison.modes import MODES
from ..comparison.report import GAP, KINK, NOT_APPLICABLE, OK, RAISES, UNSETTLED, WORKS, WRONG, Report
from .opinfo import op_samples

__all__ = ["COLUMNS", "Outcomes", "header", "lines_of", "measure", "measure_all", "totals"]

DTYPES = {"float64": torch.float64, "complex128": torch.complex128}
COLUMNS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "override()": override,
    'override("*")': lambda: override("*"),
}
COUNTED = {
    "checked": lambda o: o not in (NOT_APPLICABLE, UNSETTLED, KINK),
    "wrong": WRONG.__eq__,
    "raising": {RAISES, WORKS}.__contains__,
}
ENDED = "the process ended"
# Entries whose samples have no derivative, or none that finite differences see, and why. They are not counted.
NOT_COUNTED = {
    "__rpow__": "a power of a negative number, which is nan",
    "as_strided_partial_views": "reads memory outside of its argument, which the checker's copies do not have",
    "nn_functional_cosine_embedding_loss": "jumps in its target, which is 1 or -1",
    "nn_functional_hinge_embedding_loss": "jumps in its target, which is 1 or -1",
    "nn_functional_max_unpool1d": "one place is written to twice, in any order",
    "nn_functional_max_unpool2d": "one place is written to twice, in any order",
    "nn_functional_max_unpool3d": "one place is written to twice, in any order",
    "normal": "a random number, whose derivative is 0 by convention",
    "normal_number_mean": "a random number, whose derivative is 0 by convention",
    "round_decimals_3": "its steps are smaller than those of the finite differences",
    "tensor_split": "reads an argument as numbers, which torch.func does not allow",
}

# operator -> variant -> (dtype, column) -> mode -> outcome; and the failures of ours
Outcomes = dict[str, dict[str, dict[str, str]]]


def measure(name: str, columns: Sequence[str], limit: int | None) -> tuple[Outcomes, list[str]]:
    """One operator of the database: variant -> "dtype column" -> mode -> outcome, and every failure of ours."""
    found: Outcomes = {}
    failures: list[str] = []
    for dtype in DTYPES:
        for column in columns:
            reports: dict[str, Report] = {}
            torch.manual_seed(0)
            with COLUMNS[column]():
                for case in op_samples(name, DTYPES[dtype], limit=limit):
                    report = check(
                        case.fn,
                        [case.sample],
                        checks=(),
                        name=case.name,
                        gaps=case.gaps,
                        raise_on_failure=False,
                        diagnose=False,
                    )
                    reports[case.name] = reports.get(case.name, Report()) + report
            for variant, report in reports.items():
                outcomes = {mode: report.outcome(mode) for mode in MODES}
                if set(outcomes.values()) != {NOT_APPLICABLE}:
                    found.setdefault(variant, {})[f"{dtype} {column}"] = outcomes
                if column != "stock":
                    failures += [f"{column}: {failure}" for failure in report.failures]
    return found, failures


def _work(name: str, columns: Sequence[str], limit: int | None, answer: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # PyTorch's kernels print messages about bad arguments
    answer.send(measure(name, columns, limit))


def measure_all(
    names: Sequence[str], columns: Sequence[str], limit: int | None, workers: int | None = None
) -> tuple[Outcomes, list[str]]:
    """`measure` each operator in a process of its own, several at a time."""
    context = multiprocessing.get_context("fork")
    workers = workers or os.cpu_count() or 1
    waiting = list(reversed(names))
    running: dict[Any, tuple[str, Any]] = {}
    found: Outcomes = {}
    failures: list[str] = []
    columns_shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns_shown, console=Console(stderr=True), disable=not Console(stderr=True).is_terminal
    ) as progress:
        bar = progress.add_task("operators", total=len(names))
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(name, columns, limit, theirs))
                process.start()
                theirs.close()
                running[ours] = (name, process)
            ready: list[Any] = wait(list(running))
            for answer in ready:
                name, process = running.pop(answer)
                try:
                    outcomes, bad = answer.recv()
                except EOFError:
                    outcomes, bad = (
                        {name: {f"float64 {c}": dict.fromkeys(MODES, RAISES) for c in columns}},
                        [f"{name}: {ENDED}"],
                    )
                process.join()
                found |= outcomes
                failures += bad
                progress.update(bar, advance=1, description=f"{len(failures)} failures, last {name}")
    return dict(sorted(found.items())), failures


def header(columns: Sequence[str]) -> list[str]:
    """The header for the lines of `totals`."""
    return ["dtype", "mode", *(f"{column}: {what}" for column in columns for what in COUNTED)]


def totals(found: Outcomes, columns: Sequence[str]) -> list[list[str]]:
    """A line for each dtype and mode: checked, and for each column wrong and raising."""
    lines = []
    for dtype in DTYPES:
        for mode in MODES:
            line = [dtype, mode]
            for column in columns:
                counted = [m for variant, m in found.items() if variant not in NOT_COUNTED]
                outcomes = [m[f"{dtype} {column}"][mode] for m in counted if f"{dtype} {column}" in m]
                line += [str(sum(map(is_so, outcomes))) for is_so in COUNTED.values()]
            lines.append(line)
    sums = [str(sum(int(line[i]) for line in lines)) for i in range(2, len(lines[0]))]
    return [*lines, ["all", "all", *sums]]


def _bad(outcomes: dict[str, str]) -> str:
    """The outcomes other than right, mode by mode; "ok" if there are none."""
    by_outcome: dict[str, list[str]] = {}
    for mode, outcome in outcomes.items():
        if outcome not in (OK, NOT_APPLICABLE, GAP):
            by_outcome.setdefault(outcome, []).append(mode)
    return "; ".join(f"{outcome}: {', '.join(modes)}" for outcome, modes in by_outcome.items()) or OK


def lines_of(found: Outcomes, columns: Sequence[str]) -> list[list[str]]:
    """One line per operator and dtype; equal lines of an operator are merged."""
    lines = []
    for variant, measured in found.items():
        if variant in NOT_COUNTED:
            lines.append([variant, "both", *[f"not counted: {NOT_COUNTED[variant]}"] * len(columns)])
            continue
        texts = {
            dtype: [_bad(measured[f"{dtype} {c}"]) if f"{dtype} {c}" in measured else NOT_APPLICABLE for c in columns]
            for dtype in DTYPES
            if any(key.startswith(dtype) for key in measured)
        }
        if len(texts) == 2 and len({tuple(t) for t in texts.values()}) == 1:
            texts = {"both": texts["float64"]}
        lines += [[variant, dtype, *text] for dtype, text in texts.items()]
    return lines
