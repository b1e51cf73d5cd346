"""Writes docs/nested_operators.md: the operators on nested tensors, in PyTorch and in this package.

Run it:  python tools/nested.py                    (`make measure` does; a few minutes)
         python tools/nested.py --print softmax    (the rows whose names contain it, with every reason)
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from nested_cases import CASES, Case
from nested_probe import KINDS, MEASURES, measure

import torch_manualgrad as mg
from torch_manualgrad.nested.operators import LIMITS
from torch_manualgrad.testing.comparison.report import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "nested_operators.md"
LAYOUTS = KINDS[1:]


def apart(case: Case, kind: str, what: str, override: bool) -> tuple[str, str]:
    """`measure` in a process of its own, which may abort."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the message of an abort
        with mg.override("nested") if override else nullcontext():
            os.write(writing, json.dumps(measure(case, kind, what))[:60000].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else ("abort", f"signal {os.WTERMSIG(status)}")


Found = dict[tuple[str, str, str, bool], tuple[str, str]]


def measured(cases: Sequence[Case]) -> Found:
    """(case, kind, measure, whether under override) -> (outcome, why)."""
    found: Found = {}
    for case in cases:
        for kind in KINDS:
            for what in MEASURES:
                for override in (True, False) if kind in LAYOUTS else (True,):
                    outcome, why = apart(case, kind, what, override)
                    if override and outcome == "raises" and case.declared(kind, what):
                        outcome, why = "declared", case.declared(kind, what)
                    found[case.name, kind, what, override] = outcome, why
    return found


MARKS = {"right": "ok", "wrong": "wrong", "raises": "raises", "declared": "declared", "abort": "abort"}


def cell(found: Found, name: str, kind: str, override: bool) -> str:
    """The four outcomes; one word where they agree."""
    outcomes = [MARKS[found[name, kind, what, override][0]] for what in MEASURES]
    return outcomes[0] if len(set(outcomes)) == 1 else ", ".join(outcomes)


def page(found: Found, cases: Sequence[Case]) -> str:
    columns = [("Ragged", True), *((layout, override) for layout in LAYOUTS for override in (True, False))]
    head = ["operator", *(f"{kind}{'' if kind == 'Ragged' else ', ours' if o else ', stock'}" for kind, o in columns)]
    lines = [head, *([case.name, *(cell(found, case.name, *c) for c in columns)] for case in cases)]
    totals = [["", *MARKS.values()]]
    for kind, override in columns:
        count = Counter(found[case.name, kind, what, override][0] for case in cases for what in MEASURES)
        title = kind if kind == "Ragged" else f"{kind}, {'under override' if override else 'stock'}"
        totals.append([title, *(str(count[outcome]) for outcome in MARKS)])
    limits = "\n".join(f"- {kind}, {what}: {why}." for (kind, what), why in LIMITS.items())
    return f"""# Operators on nested tensors

[Nested tensors](nested.md) is the guide. This page has every operator in four measures: forward, backward, second order
(the gradient of a gradient) and jvp. A cell lists them in this order, or has one word if all four agree. Each is measured
in double precision through a loss on the components of the result, against a loop over the components in dense PyTorch.

- Ragged is `mg.nested.Ragged` with the functions of `mg.nested`. Strided and jagged are PyTorch's own nested tensors with
  PyTorch's own calls: "ours" under `mg.override()`, "stock" without it.
- ok: right. wrong: a wrong value, without an error. raises: an error. abort: the process ends. declared: an error that is
  declared, with its reason below, and tested.

{table(totals)}

Declared errors:

{limits}

## Operators

{table(lines)}

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/nested.py` (`make measure`).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the operators' names (default: all)")
    parser.add_argument("--print", action="store_true", help="print the page and every reason instead of writing it")
    parser.add_argument("--out", type=Path, default=PAGE, help="the file to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # what forks must not have started others
    for kind in KINDS:  # what is imported on first use is imported once, before the forks
        with mg.override("nested"):
            measure(CASES[0], kind, "second order")
    cases = [c for c in CASES if not options.names or any(n in c.name for n in options.names)]
    found = measured(cases)
    text = page(found, cases)
    if not options.print:
        options.out.write_text(text)
        print(f"wrote {options.out}")
        return
    print(text)
    for (name, kind, what, override), (outcome, why) in found.items():
        if outcome not in ("right", "declared"):
            print(f"{name}, {kind}, {'ours' if override else 'stock'}, {what}: {outcome}: {why.splitlines()[0]}")


if __name__ == "__main__":
    main()
