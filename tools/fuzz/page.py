"""The counts of a run as text."""

from __future__ import annotations

from collections import Counter

from . import judge, pool
from .run import Tally

COLUMNS = (judge.OK, judge.WRONG, judge.RAISES, judge.REFUSED, judge.UNSETTLED, judge.KINK, judge.CLOSE)


def summary(tally: Tally, *, unreached: bool = False) -> str:
    """Tables of what became of each mode, how much of the pool was reached, and what was refused.

    Args:
        tally: of a run.
        unreached: name the entries of the pool that no program has reached.
    """
    names = pool.names()
    missed = [n for n in names if n not in tally.reached]
    rows = [("", *COLUMNS), *((name, *(str(c[k]) for k in COLUMNS)) for name, c in sorted(tally.by_mode.items()))]
    rows.append(("all", *(str(tally.verdicts[k]) for k in COLUMNS)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    refused: Counter[str] = tally.refusals
    return "\n".join(
        [
            f"{tally.programs} programs in {tally.seconds:.0f} s ({tally.rejected} were none), "
            f"{len(tally.findings)} disagreements, {sum(max(n - 1, 0) for n in tally.repeats.values())} more of the same kinds",
            table,
            f"reached: {len(names) - len(missed)} of {len(names)} entries of the pool",
            *(f"  not reached: {n}" for n in missed if unreached),
            *(f"  never in a program: {n} ({why})" for n, why in pool.NOT_CALLED.items() if unreached),
            *(f"  {n} times: {text}" for text, n in tally.repeats.most_common() if n > 1),
            *(f"  {text}" for text in tally.near[:40]),
            *(f"  refused {n} times, {text}" for text, n in refused.most_common(40)),
        ]
    )
