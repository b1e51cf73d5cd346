"""Benchmarks: tables of one run, and of several."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a benchmark of one row that takes these times, and returns its table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import side_by_side  # only beside the benchmarks, which are no package

    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path)
    monkeypatch.setattr(side_by_side, "RAW", tmp_path)

    def of(ours, p, *options):
        monkeypatch.setattr(sys, "argv", ["waves.py", "--threads", "1", *options])
        times = side_by_side.summary({"stock": [4e-6, 4e-6, 4e-6], "ours": ours}, "stock")
        row = {"p": p, **times, "memory": f"{ours[0]:.3g}"}
        side_by_side.main("waves", "Waves", lambda arguments: [dict(row)], ["p", "ours"], found=["memory"])
        lines = (tmp_path / "waves.csv").read_text().splitlines()
        return lines[0], [*csv.DictReader(lines[1:])]

    return of


def test_a_further_run_widens_the_quartiles(run):
    run([1e-6, 1e-6, 1e-6], 2.0)
    first, _ = run([1e-6, 2e-6, 4e-6], 2.0)
    assert first.endswith("runs 1")
    about, rows = run([1e-6, 1e-6, 1e-6], 2.0, "--again")
    assert about.endswith("runs 2")
    (row,) = rows  # what was measured beside the times is no part of what the row is of
    assert row["1 threads ours ratio"] == "2.83"  # the geometric mean of 2 and 4
    assert row["1 threads ours quartiles"] == "1.5 to 4"
    _, rows = run([1e-6, 1e-6, 1e-6], 3.0, "--add")
    assert [row["p"] for row in rows] == ["2.0", "3.0"]
