"""Counts, mode by mode, what is right and wrong over PyTorch's whole operator database: by PyTorch and by this package.

Run it:  python tools/conformance.py                      (`make conformance`; about an hour, writes docs/coverage.md)
         python tools/conformance.py --print linalg.det   (some operators, with every failure, and writes nothing)

Each operator has a process of its own: an operator of PyTorch's that ends the process counts as one that raises.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import torch_manualgrad as mg
from torch_manualgrad.testing import MODES, check, op_samples
from torch_manualgrad.testing.opinfo import op_db
from torch_manualgrad.testing.report import GAP, NOT_APPLICABLE, OK, RAISES, UNSETTLED, WORKS, WRONG, Report, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
RAW = Path(__file__).resolve().parents[1] / "build" / "conformance.json"
DTYPES = {"float64": torch.float64, "complex128": torch.complex128}
COLUMNS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "override()": mg.override,
    'override("*")': lambda: mg.override("*"),
}
COUNTED = {
    "checked": lambda o: o not in (NOT_APPLICABLE, UNSETTLED),
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
                    how = {"checks": (), "name": case.name, "gaps": case.gaps, "raise_on_failure": False}
                    report = check(case.fn, [case.sample], **how)
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what PyTorch's kernels print of bad arguments
    answer.send(measure(name, columns, limit))


def measure_all(
    names: Sequence[str], columns: Sequence[str], limit: int | None, workers: int
) -> tuple[Outcomes, list[str]]:
    """`measure` of each operator in a process of its own, some at a time."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(names)), {}
    found: Outcomes = {}
    failures: list[str] = []
    with tqdm(total=len(names), smoothing=0, unit="operator") as progress:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(name, columns, limit, theirs))
                process.start()
                theirs.close()
                running[ours] = (name, process)
            for ours in wait(list(running)):
                name, process = running.pop(ours)
                try:
                    outcomes, bad = ours.recv()
                except EOFError:
                    outcomes, bad = (
                        {name: {f"float64 {c}": dict.fromkeys(MODES, RAISES) for c in columns}},
                        [f"{name}: {ENDED}"],
                    )
                process.join()
                found |= outcomes
                failures += bad
                progress.update()
                progress.set_postfix_str(f"{len(failures)} failures, last {name}")
    return dict(sorted(found.items())), failures


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
    """What is not right, mode by mode; "ok" if everything is."""
    by_outcome: dict[str, list[str]] = {}
    for mode, outcome in outcomes.items():
        if outcome not in (OK, NOT_APPLICABLE, GAP):
            by_outcome.setdefault(outcome, []).append(mode)
    return "; ".join(f"{outcome}: {', '.join(modes)}" for outcome, modes in by_outcome.items()) or OK


def lines_of(found: Outcomes, columns: Sequence[str]) -> list[list[str]]:
    """A line for each operator and dtype; those of one operator are one where they say the same."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators, by the database's names (default: all)")
    parser.add_argument("--limit", type=int, default=6, help="samples of each variant (default: 6)")
    parser.add_argument("--columns", nargs="*", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time (default: all cores)")
    parser.add_argument(
        "--print", action="store_true", help="print the table and the failures instead of writing the page"
    )
    options = parser.parse_args()
    names = options.names or sorted({op.name for op in op_db() if op.supports_autograd})
    found, failures = measure_all(names, options.columns, options.limit, options.workers)
    header = ["dtype", "mode", *(f"{column}: {what}" for column in options.columns for what in COUNTED)]
    summary = table([header, *totals(found, options.columns)])
    text = table([["operator", "dtype", *options.columns], *lines_of(found, options.columns)])
    if options.print:
        print(text, *failures, summary, sep="\n")
        return
    RAW.parent.mkdir(exist_ok=True)
    RAW.write_text(json.dumps({"outcomes": found, "failures": failures}, indent=1))
    PAGE.write_text(f"""# Coverage

PyTorch's operators in six modes, on the samples of its own operator database (at most {options.limit} of each variant), each mode
against finite differences in double precision: by PyTorch, under `mg.override()` (the rules that improve on PyTorch) and
under `mg.override("*")` (all rules). Of a mode's two words the first is the outer transform. Counted are operators and
their variants; one counts as wrong or raising in a mode if it is so at one sample.

{summary}

- ok: right in every mode. wrong: a wrong value. raises: an error. unsettled: the finite differences do not converge at a
  sample, as at the kinks that are all the samples of linalg_norm_subgradients_at_zero; tests look at those by themselves.
- Given a compressed sparse tensor, which torch.func does not take, torch.autograd alone is checked.
- Only dtypes whose gradients the database says are supported are checked: complex `to_sparse`, which PyTorch refuses and a
  rule differentiates, is not.
- -: nothing to differentiate in this dtype. not counted: why the samples say nothing of a derivative.

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/conformance.py` (`make conformance`).

{text}
""")
    print(summary)
    print(f"wrote {PAGE}, and {len(failures)} failures to {RAW}")


if __name__ == "__main__":
    main()
