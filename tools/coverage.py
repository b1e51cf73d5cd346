"""Writes docs/coverage.md: PyTorch's operators in six modes, by PyTorch and by this package's rules.

Run it:  python tools/coverage.py                      (`make docs` does; half an hour)
         python tools/coverage.py --print linalg.det   (a table of one, with every failure)
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import torch_manualgrad as mg
from torch_manualgrad.testing import MODES, Report, check, op_samples
from torch_manualgrad.testing.opinfo import reached
from torch_manualgrad.testing.report import NOT_APPLICABLE, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / f"{Path(__file__).stem}.md"
DTYPES = (torch.float64, torch.complex128)
COLUMNS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "override()": mg.override,
    'override("*")': lambda: mg.override("*"),
}


def measure(name: str, dtype: torch.dtype, limit: int | None, context: Callable[[], Any]) -> dict[str, Report]:
    """Variant of the operator -> what was found."""
    found: dict[str, Report] = {}
    with context():
        for case in op_samples(name, dtype, limit=limit):
            report = check(case.fn, [case.sample], checks=(), name=case.name, raise_on_failure=False)
            found[case.name] = found.get(case.name, Report()) + report
    return found


def rows(names: Sequence[str], columns: Sequence[str], limit: int | None) -> tuple[list[list[str]], list[str]]:
    """The lines of the table, and every failure of ours."""
    lines, failures = [], []
    for name in names:
        for dtype in DTYPES:
            measured = {c: measure(name, dtype, limit, COLUMNS[c]) for c in columns}
            for variant in dict.fromkeys(v for m in measured.values() for v in m):
                for column in columns:
                    report = measured[column].get(variant, Report())
                    outcomes = [report.outcome(mode) for mode in MODES]
                    if set(outcomes) != {NOT_APPLICABLE}:
                        lines.append([variant, str(dtype).removeprefix("torch."), column, *outcomes])
                    if column != "stock":
                        failures += [f"{column}: {failure}" for failure in report.failures]
    return lines, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators, by the database's names (default: all that reach a rule)")
    parser.add_argument("--limit", type=int, default=6, help="samples of each variant (default: 6)")
    parser.add_argument("--columns", nargs="*", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--print", action="store_true", help="print the table instead of writing the page")
    parser.add_argument("--out", type=Path, default=PAGE, help="the file to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, failures = rows(options.names or reached(), options.columns, options.limit)
    text = table([["operator", "dtype", "derivatives", *MODES], *lines])
    if options.print:
        print(text, *failures, sep="\n")
        return
    options.out.write_text(f"""# Coverage

PyTorch's operators in six modes, on the samples of its own operator database (at most {options.limit} of each variant), each mode
against finite differences in double precision: by PyTorch, under `mg.override()` (the rules that improve on PyTorch) and
under `mg.override("*")` (all rules). Of a mode's two words the first is the outer transform.

- ok: right. wrong: a wrong value. raises: an error. unsettled: the finite differences do not converge at a sample, as
  at the kinks that are all the samples of linalg_norm_subgradients_at_zero; the tests look at those by themselves.
- gap: declared on the rule with a reason, and proven to raise. -: nothing to differentiate.

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/coverage.py` (`make docs`).

{text}
""")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
