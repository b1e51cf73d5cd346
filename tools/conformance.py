"""Counts, mode by mode, what is right and wrong over PyTorch's whole operator database, and writes docs/coverage.md.

Run it:  python tools/conformance.py                (`make conformance`; about an hour)
         python tools/conformance.py linalg.det     (these again, the others from the last run)
         manualgrad conformance linalg.det          (these alone, with every failure; writes nothing)
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from torch_manualgrad.testing.conformance import COLUMNS, Outcomes, header, lines_of, measure_all, totals
from torch_manualgrad.testing.opinfo import op_db
from torch_manualgrad.testing.report import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
RAW = Path(__file__).resolve().parents[1] / "build" / "conformance.json"


def page(found: Outcomes, limit: int) -> str:
    """The text of docs/coverage.md."""
    columns = list(COLUMNS)
    summary = table([header(columns), *totals(found, columns)])
    text = table([["operator", "dtype", *columns], *lines_of(found, columns)])
    return f"""# Coverage

PyTorch's operators in six modes, on the samples of its own operator database (at most {limit} of each variant), each mode
against finite differences in double precision: by PyTorch, under `mg.override()` (the rules that improve on PyTorch) and
under `mg.override("*")` (all rules). Of a mode's two words the first is the outer transform. Counted are operators and
their variants; one counts as wrong or raising in a mode if it is so at one sample.

{summary}

- ok: right in every mode. wrong: a wrong value. raises: an error. not differentiable: a sample is at a kink, where only
  what is certainly no derivative counts as wrong. unsettled: the finite differences do not converge at a sample, for
  another reason or none that was found; all samples of linalg_norm_subgradients_at_zero are kinks, and tests look at
  those by themselves.
- Given a compressed sparse tensor, which torch.func does not take, torch.autograd alone is checked.
- Only dtypes whose gradients the database says are supported are checked: complex `to_sparse`, which PyTorch refuses and a
  rule differentiates, is not.
- -: nothing to differentiate in this dtype. not counted: why the samples say nothing of a derivative.

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/conformance.py` (`make conformance`).

{text}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=6, help="samples of each variant (default: 6)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time (default: all cores)")
    parser.add_argument("names", nargs="*", help="measure these again, and take the others from the last run")
    options = parser.parse_args()
    last = json.loads(RAW.read_text()) if options.names else {"outcomes": {}, "failures": []}
    names = options.names or sorted({op.name for op in op_db() if op.supports_autograd})
    found, failures = measure_all(names, list(COLUMNS), options.limit, options.workers)
    found = dict(sorted({**last["outcomes"], **found}.items()))
    RAW.parent.mkdir(exist_ok=True)
    RAW.write_text(json.dumps({"outcomes": found, "failures": failures}, indent=1))
    PAGE.write_text(page(found, options.limit))
    print(f"wrote {PAGE}, and {len(failures)} failures to {RAW}")


if __name__ == "__main__":
    main()
