"""In how many ways of using PyTorch an overridden operator does what the stock one does.

Writes the sums to docs/parity.md, and a line for each way to build/measure/parity.md, which the site includes.

Run it:  python tools/parity.py                             (`make measure` does; hours)
         python tools/parity.py --way "make_fx, real"       (prints the cells that fail in one way, and writes nothing)
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))

from cells import FAILS, HOLDS, IMPROVED, MODES, STOCK_FAILS, Cell, measure, pins
from rows import rows
from ways import DEAR, HANDFUL, SLOW, WAYS, Way

from torch_manualgrad.testing.comparison.report import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / f"{Path(__file__).stem}.md"
HEADER = ["way", "override", "tried", "stock holds", "ours holds", "improved", "declared", "fails", "stock fails"]


def lines_of(way: Way, cells: list[Cell]) -> list[list[str]]:
    """One line for each override: how many cells came out how."""
    declared = pins()
    found = []
    for mode in MODES:
        here = [c for c in cells if c.mode == mode]
        counts = Counter(c.outcome for c in here)
        pinned = sum(c.outcome == FAILS and any(p.covers(c) for p in declared) for c in here)
        holds = len(here) - counts[STOCK_FAILS]
        numbers = [
            len(here),
            holds,
            counts[HOLDS],
            counts[IMPROVED],
            pinned,
            counts[FAILS] - pinned,
            counts[STOCK_FAILS],
        ]
        found.append([way.name, f"`{mode}`", *map(str, numbers)])
    return found


WHOLE = PAGE.parents[1] / "build" / "measure" / PAGE.name


def page(measured: dict[str, list[Cell]]) -> tuple[str, str]:
    """The text of the page, and of that with a line for each way."""
    lines = [line for name, cells in measured.items() for line in lines_of(WAYS[name], cells)]
    notable = [
        line for line in lines if any(line[HEADER.index(column)] != "0" for column in ("improved", "declared", "fails"))
    ]
    totals = []
    for mode in MODES:
        mine = [line for line in lines if line[1] == f"`{mode}`"]
        totals.append(
            ["**all**", f"`{mode}`", *(f"**{sum(int(line[i]) for line in mine)}**" for i in range(2, len(HEADER)))]
        )
    tried = sum(len(cells) for cells in measured.values())
    summary = f"""# Parity

A program that runs on stock PyTorch runs under `mg.override()` and `mg.override("*")`, with the same values wherever
stock's are right. {tried} cells were tried: {len(measured)} ways of using a derivative x {len(rows())} rows (every rule on one of its samples,
and public functions that reach several rules; {len(HANDFUL)} rows where a way compiles or traces), real and complex.

- stock holds: in this way stock PyTorch gives finite numbers, the same as without the way.
- ours holds: so does the override. Its derivatives are stock's to rounding, and its forward values are bitwise identical to stock's.
- improved: our numbers are the same as without the way, stock's differ from them, and the rule claims better values. Other tests
  compare the rule's values with finite differences.
- declared: ours differs, and `tests/parity/pinned.md` gives the reason.
- fails: ours differs without a declared reason. `tests/parity/test_parity.py` fails.
- stock fails: stock PyTorch raises or is not finite in this way. Ours may raise too, but must not return a wrong number.

The sums, and the ways in which a number is not stock's:

{table([HEADER, *totals, *notable])}

Measured on torch {torch.__version__.partition("+")[0]}, CPU, {datetime.date.today()}. `python tools/parity.py` measures it again
(`make measure`), and writes a line for each way to `build/measure/parity.md`, which the site includes.
"""
    return summary, f"# Parity of each way\n\n{table([HEADER, *totals, *lines])}\n"


def cells_of(way: str) -> list[Cell]:
    """One sample of each dtype; dear ways on a handful of rows."""
    chosen = [r for r in rows() if WAYS[way].cost != DEAR or r.name in HANDFUL]
    return [c for row in chosen for c in measure(WAYS[way], row, 1)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE, help="the file to write")
    parser.add_argument("--way", action="append", choices=list(WAYS), metavar="WAY", help="this way only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    names = options.way or [w.name for w in WAYS.values() if w.cost != SLOW]
    measured = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for name, cells in zip(names, pool.map(cells_of, names), strict=True):
            measured[name] = cells
            print(
                "\n".join([f"{name}: {len(cells)} cells", *(f"  {c}" for c in cells if c.outcome == FAILS)]), flush=True
            )
    if not options.way:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        WHOLE.parent.mkdir(parents=True, exist_ok=True)
        summary, whole = page(measured)
        options.out.write_text(summary)
        WHOLE.write_text(whole)
        print(f"wrote {options.out} and {WHOLE}")
