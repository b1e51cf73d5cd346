"""Counts, mode by mode, what is right and wrong over PyTorch's whole operator database, and writes docs/coverage.md.

Run it:  python tools/conformance.py                (`make conformance`; about an hour)
         manualgrad conformance linalg.det          (some operators, with every failure; writes nothing)
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from torch_manualgrad.testing.conformance import COLUMNS, header, lines_of, measure_all, totals
from torch_manualgrad.testing.opinfo import op_db
from torch_manualgrad.testing.report import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
RAW = Path(__file__).resolve().parents[1] / "build" / "conformance.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=6, help="samples of each variant (default: 6)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time (default: all cores)")
    options = parser.parse_args()
    names = sorted({op.name for op in op_db() if op.supports_autograd})
    found, failures = measure_all(names, list(COLUMNS), options.limit, options.workers)
    summary = table([header(list(COLUMNS)), *totals(found, list(COLUMNS))])
    text = table([["operator", "dtype", *COLUMNS], *lines_of(found, list(COLUMNS))])
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
