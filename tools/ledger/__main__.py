"""Runs the programs of the ledger, and writes docs/issues.csv and docs/issues.md from what they do.

    python tools/ledger                                  (`make ledger`)
    python tools/ledger --python .venv-2.15.0/bin/python measures with another torch as well
    python tools/ledger 196682 2421                      prints these alone

Each torch is measured by a process of its own, which prints JSON. The table has a column for each. A run fills in those
of this interpreter, of the environments that `make test-torch` has made and of each `--python`, and keeps the others.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_manualgrad as mg
from ledger import entries
from ledger.programs import ENTRIES, Entry

assert entries  # they enter themselves

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TORCH = ".".join(torch.__version__.split(".")[:2])
RIGHT = "right"


def outcome(program: Callable[[], Any], entry: Entry) -> str:
    """ "right", "nan", "wrong: <value>" or "raises <type>"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = program()
        except Exception as error:
            return f"raises {type(error).__name__}"
        expected = entry.expected() if callable(entry.expected) else entry.expected
    x, y = _double(found), _double(expected)
    if x.isnan().any() and not y.isnan().any():
        return "nan"
    if (
        x.shape != y.shape
        and y.ndim
        or not torch.allclose(x, y.expand_as(x), rtol=entry.tolerance, atol=entry.tolerance * _size(y))
    ):
        return f"wrong: {_first(x, y)}"
    return RIGHT


def _double(v: Any) -> Tensor:
    return v.detach().double() if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64)


def _size(y: Tensor) -> float:
    return float(y.abs().max()) if y.numel() else 0.0


def _first(x: Tensor, y: Tensor) -> str:
    if x.shape != y.shape and y.ndim:
        return f"shape {list(x.shape)} for {list(y.shape)}"
    worst = (x - y).abs().flatten().argmax()
    return f"{x.flatten()[worst]:.4g} for {y.expand_as(x).flatten()[worst]:.4g}"


def stock(entry: Entry) -> str:
    return outcome(entry.program, entry)


def ours(entry: Entry) -> str:
    if entry.override is None:
        return outcome(entry.ours or entry.program, entry)
    options = dict(entry.override)
    names = [options.pop("names")] if "names" in options else []
    with mg.override(*names, **options):
        return outcome(entry.program, entry)


def measured(numbers: Sequence[int]) -> dict[int, tuple[str, str]]:
    return {n: (stock(ENTRIES[n]), ours(ENTRIES[n])) for n in numbers}


def measured_by(python: str) -> dict[str, Any]:
    """Runs the entries with another interpreter's torch: its release, and the outcomes of each entry."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [python, str(Path(__file__).parent), "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def read() -> dict[int, dict[str, str]]:
    with contextlib.suppress(FileNotFoundError), (DOCS / "issues.csv").open() as file:
        return {int(row.pop("issue")): row for row in csv.DictReader(file)}
    return {}


def releases(table: dict[int, dict[str, str]]) -> list[str]:
    found = {column.split()[1] for row in table.values() for column in row}
    return sorted(found, key=lambda v: tuple(map(int, v.split("."))))


def write(table: dict[int, dict[str, str]]) -> None:
    torches = releases(table)
    columns = [f"{who} {t}" for who in ("stock", "override") for t in torches]
    rows = {n: table[n] for n in sorted(ENTRIES) if n in table}
    with (DOCS / "issues.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["issue", *columns])
        writer.writerows([n, *[row.get(c, "") for c in columns]] for n, row in rows.items())
    (DOCS / "issues.md").write_text(page(rows, torches))


_PAGE = """# PyTorch's issues

{count} issues of pytorch/pytorch about derivatives. The samples of {failing} fail on PyTorch here, on at least one version:
{answers} of these are right with this package, {open_count} are not. The samples of the other {right} are right on PyTorch, and
stay right under the rules.

Each issue has a sample in `tools/ledger/entries`, a program that is run on every version. The columns "torch" are PyTorch's
own derivatives, and "ours" is the result with this package. "with" is what you have to use: a call of `override`, or "op":
the operator rewritten with `mg.custom_op` or another function of this package.

`make ledger` generates this page. `make ledger ARGS='2421'` runs the sample of one issue, on PyTorch and with this package. If
you have an error message and no number, `manualgrad explain <the operator that it names>` says what this package has.

## PyTorch's derivative fails

{answered}

## PyTorch's derivative is right

Some of these issues are open: the fault occurs on devices that are not tested here, or the issue was not closed.

{settled}

## Not answered

Here ours is not right either, on some of these versions.

{open}
"""


def page(rows: dict[int, dict[str, str]], torches: Sequence[str]) -> str:
    open_ = {n: row for n, row in rows.items() if ENTRIES[n].open}
    failing = {
        n: row
        for n, row in rows.items()
        if n not in open_ and {row.get(f"stock {t}") for t in torches} - {RIGHT, None, ""}
    }
    settled = {n: row for n, row in rows.items() if n not in open_ and n not in failing}
    return _PAGE.format(
        count=len(rows),
        failing=len(failing) + len(open_),
        answers=len(failing),
        open_count=len(open_),
        right=len(settled),
        answered=_table(failing, torches, {"with": _with}),
        settled=_table(settled, torches, {"with": _with}),
        open=_table(open_, torches, {"with": _with, "why": lambda entry: entry.open}),
    )


def _table(rows: dict[int, dict[str, str]], torches: Sequence[str], more: dict[str, Callable[[Entry], str]]) -> str:
    heads = ["issue", "about", *[f"torch {t}" for t in torches], "ours", *more]
    lines = [heads, ["---"] * len(heads)]
    for n, row in rows.items():
        entry = ENTRIES[n]
        link = f"[#{n}](https://github.com/pytorch/pytorch/issues/{n})"
        stocks = [row.get(f"stock {t}", "") for t in torches]
        lines.append([link, entry.title, *stocks, _ours(row, torches), *[column(entry) for column in more.values()]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ours(row: dict[str, str], torches: Sequence[str]) -> str:
    """One outcome where all versions agree, otherwise each."""
    found = {t: row[f"override {t}"] for t in torches if row.get(f"override {t}")}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{t}: {outcome}" for t, outcome in found.items())


def _with(entry: Entry) -> str:
    if entry.override is None:
        return "op"
    options = dict(entry.override)
    names = [repr(options.pop("names")).replace("'", '"')] if "names" in options else []
    return f"`override({', '.join([*names, *[f'{k}={v}' for k, v in options.items()]])})`"


def named(wanted: str) -> list[int]:
    """The issue of a number, or those with a word in their titles."""
    wanted = wanted.lstrip("#")
    return [n for n, entry in ENTRIES.items() if wanted == str(n) or not wanted.isdigit() and wanted in entry.title]


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch's issues about derivatives, and what becomes of them here.")
    parser.add_argument("--python", action="append", default=[], help="an interpreter with another torch")
    parser.add_argument("--json", action="store_true", help="print the outcomes with this torch, and write nothing")
    parser.add_argument("numbers", nargs="*", help="print these issues, by number or words of the title; write nothing")
    options = parser.parse_args()
    if options.json:
        print(json.dumps({"torch": TORCH, "outcomes": measured(sorted(ENTRIES))}))
        return
    if options.numbers:
        chosen = [n for wanted in options.numbers for n in named(wanted)]
        if not chosen:
            parser.error(f"no sample of {' '.join(options.numbers)}; docs/issues.md lists them")
        for n, (before, after) in measured(chosen).items():
            print(f"#{n} {ENTRIES[n].title}\n  PyTorch: {before}\n  ours:    {after}")
        return
    table = read()
    for python in [sys.executable, *sorted(map(str, ROOT.glob(".venv-*/bin/python"))), *options.python]:
        found = measured_by(python)
        for n, (before, after) in found["outcomes"].items():
            columns = {f"stock {found['torch']}": before, f"override {found['torch']}": after}
            table.setdefault(int(n), {}).update(columns)
            if after != RIGHT and not ENTRIES[int(n)].open:
                print(f"torch {found['torch']}, #{n} {ENTRIES[int(n)].title}: {after}")
    write(table)
    print(f"{len(ENTRIES)} issues; docs/issues.md")


if __name__ == "__main__":
    main()
