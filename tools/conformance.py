"""Counts right and wrong derivatives, mode by mode, over PyTorch's whole operator database.

Writes a summary to docs/coverage.md, and a line for each operator to build/measure/coverage.md, which the site includes.

Run it:  python tools/conformance.py                (`make conformance`; about an hour)
         python tools/conformance.py linalg.det     (these again, the others from the last run)
         manualgrad conformance linalg.det          (these alone, with every failure; writes nothing)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path

import torch

from torch_manualgrad.testing.comparison import report
from torch_manualgrad.testing.comparison.report import table
from torch_manualgrad.testing.database.conformance import COLUMNS, Outcomes, header, lines_of, measure_all, totals
from torch_manualgrad.testing.database.opinfo import op_db

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
WHOLE = ROOT / "build" / "measure" / "coverage.md"
RAW = ROOT / "build" / "conformance.json"


def page(found: Outcomes, limit: int) -> str:
    """The text of docs/coverage.md."""
    columns = list(COLUMNS)
    summary = table([header(columns), *totals(found, columns)])
    ours = columns[1:]
    right = (report.OK, report.NOT_APPLICABLE)
    lines = [line for line in lines_of(found, columns) if not line[-1].startswith("not counted")]
    left = [[*line[:2], *line[3:]] for line in lines if any(text not in right for text in line[3:])]
    return f"""# Coverage

PyTorch's operators in six modes, on the samples of its own operator database (at most {limit} of each variant), each mode
against finite differences in double precision: by PyTorch, under `mg.override()` (the rules that improve on PyTorch) and
under `mg.override("*")` (all rules). Of a mode's two words the first is the outer transform. Operators and
their variants are counted; one counts as wrong or raising in a mode if it is so at one sample.

{summary}

Under an override these are not right in every mode:

{table([["operator", "dtype", *ours], *left])}

- wrong: a wrong value. raises: an error. unsettled: the finite differences do not converge at a sample. All samples of
  linalg_norm_subgradients_at_zero are kinks; other tests cover them. Samples at a kink are "not differentiable": only a
  value that is certainly no derivative counts as wrong.
- torch.func does not take compressed sparse tensors: only torch.autograd is checked with them.
- Only dtypes whose gradients the database says are supported are checked. Complex `to_sparse`, which PyTorch refuses and a
  rule differentiates, is not.

Measured on torch {torch.__version__.partition("+")[0]}, CPU, {datetime.date.today()}. `make conformance` measures it again and
writes a line for each operator to `build/measure/coverage.md`, which the site includes. `manualgrad conformance linalg.det`
measures one operator.
"""


def whole(found: Outcomes) -> str:
    """The text of build/measure/coverage.md."""
    columns = list(COLUMNS)
    return f"""# Coverage of each operator

ok: right in every mode. -: nothing to differentiate in this dtype. not counted: why the samples say nothing of a derivative.

{table([["operator", "dtype", *columns], *lines_of(found, columns)])}
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
    WHOLE.parent.mkdir(exist_ok=True)
    WHOLE.write_text(whole(found))
    print(f"wrote {PAGE} and {WHOLE}, and {len(failures)} failures to {RAW}")


if __name__ == "__main__":
    main()
