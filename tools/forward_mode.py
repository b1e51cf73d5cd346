"""Counts the operators of PyTorch's database that lack forward mode, and those that `mg.forward_ad.enable` gives it.

Run it:  python tools/forward_mode.py             (half a minute)
         python tools/forward_mode.py --samples 8 (per entry, instead of 2)

Each entry that the database marks as without forward mode, and with reverse mode, runs on its samples in double
precision: the tangents are compared with finite differences by PyTorch, by the backward transposed alone, and by all that
`enable` has; and so are those of reverse mode over forward mode by the last.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tqdm import tqdm

import torch_manualgrad as mg
from torch_manualgrad.testing.comparison.report import OK, RAISES, WRONG, Report, table
from torch_manualgrad.testing.database.opinfo import Case, op_db, op_samples

COLUMNS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "PyTorch": ("fwd", nullcontext),
    "transposition": ("fwd", lambda: mg.forward_ad.enable(by=("transposition",))),
    "enable()": ("fwd", mg.forward_ad.enable),
    "and reverse over it": ("rev-fwd", mg.forward_ad.enable),
}
RANDOM = ("normal", "normal_number_mean")  # their derivative is 0 by convention, and theirs is it
LARGEST = 20_000  # numbers in a sample; finite differences of more take minutes


def lacking() -> list[Any]:
    """The entries that are marked so."""
    return [op for op in op_db() if op.supports_autograd and not op.supports_forward_ad]


def cases(op: Any, limit: int) -> list[Case]:
    """Samples of one entry, the same at each call."""
    torch.manual_seed(0)
    found = [case for case in op_samples(op.name) if case.name == op.formatted_name and _size(case) <= LARGEST]
    return found[:: max(1, len(found) // limit)][:limit]


def _size(case: Case) -> int:
    return sum(x.numel() for x in case.sample.args if isinstance(x, torch.Tensor))


def outcome(chosen: list[Case], mode: str) -> tuple[str, str]:
    """The outcome of a mode on the samples, and the first error."""
    report = Report()
    for case in chosen:
        report += mg.testing.check(
            case.fn, [case.sample], name=case.name, modes=(mode,), checks=(), raise_on_failure=False, diagnose=False
        )
    found = report.outcome(mode) if report.results else "no samples"
    details = [f.detail.partition("\n")[0] for f in report.failures if f.outcome == RAISES]
    return found, details[
        0
    ] if details else "wrong by PyTorch's own formula, which is left alone" if found == WRONG else ""


def main() -> None:
    """Print the table, and below it how many there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2, help="of each entry (default: 2)")
    limit = parser.parse_args().samples
    warnings.simplefilter("ignore")
    entries = lacking()
    outcomes: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for op in tqdm(entries, leave=False):
        chosen = cases(op, limit)
        outcomes[op.formatted_name] = row = []
        for column, (mode, switched_on) in COLUMNS.items():
            with switched_on():
                found, why = outcome(chosen, mode)
            row.append(found)
            if column == "enable()":
                reasons[op.formatted_name] = "drawn at random: 0 by convention" if op.formatted_name in RANDOM else why
    print(table([["operator", *COLUMNS, "what stays"], *([n, *row, reasons[n][:90]] for n, row in outcomes.items())]))
    right = [name for name, row in outcomes.items() if row[0] == OK and name not in RANDOM]
    random = [name for name in outcomes if name in RANDOM]
    lacks = [name for name, row in outcomes.items() if row[0] in (RAISES, WRONG) and name not in RANDOM]
    rest = len(entries) - len(right) - len(random) - len(lacks)
    by_transposition = [name for name in lacks if outcomes[name][1] == OK]
    gained = [name for name in lacks if outcomes[name][2] == OK]
    again = [name for name in gained if outcomes[name][3] == OK]
    print(
        f"\ntorch {torch.__version__}: {len(entries)} entries are marked as without forward mode. {len(right)} have it all "
        f"the same, {len(random)} are random, {rest} have no samples that finite differences can judge; {len(lacks)} raise or are wrong. "
        f"{len(gained)} of them gain it, {len(by_transposition)} by transposition alone; {len(again)} reverse over it, too."
    )
    print(f"have it: {', '.join(right)}")
    print(f"gain it: {', '.join(gained)}")
    print(f"by transposition alone: {', '.join(by_transposition)}")
    print(f"gain it, but not reverse over it: {', '.join(name for name in gained if name not in again)}")
    print(f"do not: {', '.join(name for name in lacks if name not in gained)}")


if __name__ == "__main__":
    main()
