"""Measures what PyTorch's own derivatives do where a rule claims to be better, and writes build/measure/stock.csv.

Each operator runs on the first samples of its rule, real and complex, in six modes against finite differences. The table
has a column for each torch that was measured; a run fills in that of the torch that is installed, and keeps the others:

    python tools/stock.py                           (some minutes; `make measure` runs it)
    python tools/stock.py aten::cumprod             (these alone; the other rows stay)
    .venv-2.15.0/bin/python tools/stock.py

It ends with the sums for docs/versions.md.
"""

from __future__ import annotations

import contextlib
import csv
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import torch_manualgrad as mg
from torch_manualgrad.testing import MODES, check
from torch_manualgrad.testing.comparison.report import table as table_of

TABLE = Path(__file__).resolve().parents[1] / "build" / "measure" / "stock.csv"
TORCH = ".".join(torch.__version__.split(".")[:2])
ABSENT = "-"  # this torch has no such operator
RIGHT = "right"
ENDED = "ends the process"
SAMPLES = 3


def samples(rule: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The rule's samples that the operator itself takes in this dtype."""
    for sample in rule.samples(dtype, "cpu"):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            rule.aten(*sample.args, **sample.kwargs)
            yield sample


def outcomes(name: str) -> str:
    """The modes that are wrong or raise at one of the samples: ``wrong: fwd-fwd; raises: fwd``."""
    torch.manual_seed(0)
    rule = mg.rules[name]
    options: dict[str, Any] = {"checks": (), "raise_on_failure": False, "diagnose": False}
    taken = [[*islice(samples(rule, dtype), SAMPLES)] for dtype in (torch.float64, torch.complex128)]
    found: dict[str, list[str]] = {"wrong": [], "raises": []}
    for mode in MODES:
        here = {check(rule.probe, some, modes=(mode,), **options).outcome(mode) for some in taken if some}
        for outcome, modes in found.items():
            modes += [mode] * (outcome in here)
    return "; ".join(f"{outcome}: {', '.join(modes)}" for outcome, modes in found.items() if modes) or RIGHT


def _work(name: str, answer: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what PyTorch's kernels print of bad arguments
    answer.send(outcomes(name))


def measured(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The outcomes of each, as they come: each has a process of its own, as some of PyTorch's operators end it."""
    context = multiprocessing.get_context("fork")
    waiting, running = [*reversed(names)], {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=_work, args=(name, theirs)).start()
            theirs.close()
            running[ours] = name
        for answer in wait([*running]):
            try:
                outcome = answer.recv()  # type: ignore[union-attr]
            except EOFError:
                outcome = ENDED
            yield running.pop(answer), outcome  # type: ignore[call-overload]


def known() -> dict[str, dict[str, str]]:
    """The table as it is: operator -> torch -> outcomes."""
    if not TABLE.exists():
        return {}
    with TABLE.open() as file:
        return {row.pop("operator"): row for row in csv.DictReader(file)}


def write(found: dict[str, str]) -> None:
    """Put the outcomes on this torch into the table."""
    table = known()
    versions = {TORCH, *(version for row in table.values() for version in row)}
    columns = ["operator", *sorted(versions, key=lambda version: [int(part) for part in version.split(".")])]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval=ABSENT, lineterminator="\n")
        writer.writeheader()
        for name in sorted({*table, *found}):
            row = table.get(name, {})
            writer.writerow({"operator": name, **row, TORCH: found.get(name, row.get(TORCH, ABSENT))})


def sums() -> str:
    """Counts of operators by torch: wrong in some mode; raising in some, but never wrong; right."""
    rows = list(known().values())
    lines = [["torch", "operators", "wrong in some mode", "raise in some mode", "right at the samples"]]
    for version in rows[0] if rows else ():
        found = [row[version] for row in rows if row[version] != ABSENT]
        wrong, right = sum("wrong" in outcome for outcome in found), found.count(RIGHT)
        lines.append([version, *map(str, (len(found), wrong, len(found) - wrong - right, right))])
    return table_of(lines)


def main() -> None:
    # Rows that the table also has from another torch: a claim may have ended, or not have begun, on this one.
    table = known()
    claimed = [name for name, rule in mg.rules.items() if name in table or {"values", "missing"} & {*rule.claims}]
    found = {}
    for name, outcome in measured(sorted(sys.argv[1:] or claimed)):
        print(f"{name}: {outcome}", flush=True)
        found[name] = outcome
    write(found)
    print(sums())


if __name__ == "__main__":
    main()
