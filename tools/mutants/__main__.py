"""Counts the wrong derivatives that `mg.testing.check` and PyTorch's own checks catch; writes docs/mutants.md.

Run it:  python tools/mutants                            (`make mutants`; half an hour)
         python tools/mutants --kind sign --limit 10     (prints what became of these; writes nothing)

What is known is in build/mutants.json, and a run that was interrupted goes on from there; --again starts anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.candidates import KINDS
from mutants.page import page, survivors, table_of
from mutants.run import run

ROOT = Path(__file__).resolve().parents[2]
#: Checks of what PyTorch makes of a function, in which many of its own operators raise: no verdict on a derivative.
OF_PROGRAMS = ["compile", "compiled", "compiled autograd", "make_fx", "meta", "batched gradients", "autocast"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append", help="these kinds alone")
    parser.add_argument("--limit", type=int, default=20, help="mutants of each kind (default: 20)")
    parser.add_argument("--right", type=int, default=135, help="right functions besides the originals (default: 135)")
    parser.add_argument("--leave-out", nargs="*", default=OF_PROGRAMS, help="checks that are not run")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--again", action="store_true", help="start anew")
    options = parser.parse_args()
    path = ROOT / "build" / "mutants.json"
    if options.again:
        path.unlink(missing_ok=True)
    all_of_them = options.kind is None
    results = run(
        options.kind or KINDS,
        options.limit,
        options.right if all_of_them else 0,
        options.leave_out,
        options.workers,
        path,
    )
    print(table_of(results, options.kind or KINDS))
    print(survivors(results, options.kind or KINDS))
    if all_of_them:
        text, listed = page(results, options.leave_out)
        (ROOT / "docs" / "mutants.md").write_text(text)
        (ROOT / "build" / "measure").mkdir(parents=True, exist_ok=True)
        (ROOT / "build" / "measure" / "mutants.csv").write_text(listed)


if __name__ == "__main__":
    main()
