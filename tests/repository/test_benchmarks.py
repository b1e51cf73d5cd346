"""Benchmarks: tables of one run, and of several."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


MOST_LINES = {"nested_override.csv": 90}  # of benchmarks/results
# in documents -> in tables
NAMES = {
    "LU": "lu",
    "SVD": "svd",
    "Hermitian eigenvalues": "eigh",
    "Cholesky": "cholesky",
    "QR": "qr",
    "determinant": "det",
    "inverse": "inv",
    "solve": "solve",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a benchmark of one row that takes these times, and returns its table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import side_by_side  # only beside the benchmarks, which are no package

    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path)
    monkeypatch.setattr(side_by_side, "RAW", tmp_path)

    def of(ours, p, *options, **how):
        monkeypatch.setattr(sys, "argv", ["waves.py", "--threads", "1", *options])
        times = side_by_side.summary({"stock": [4e-6, 4e-6, 4e-6], "ours": ours}, "stock")
        row = {"p": p, **times, "memory": f"{ours[0]:.3g}"}
        side_by_side.main("waves", "Waves", lambda arguments: [dict(row)], ["p", "ours"], found=["memory"], **how)
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


def test_of_a_large_table_a_part_is_kept(run, tmp_path, monkeypatch):
    import side_by_side

    monkeypatch.setattr(side_by_side, "RAW", tmp_path / "raw")
    _, rows = run([1e-6, 1e-6, 1e-6], 2.0, kept=lambda table: [line[:1] for line in table])
    assert rows == [{"p": "2.0"}]
    _, columns, _ = (tmp_path / "raw" / "waves.csv").read_text().splitlines()
    assert columns == "p,memory,1 threads stock us,1 threads ours us"


def test_kept_tables_are_small():
    for path in (BENCHMARKS / "results").glob("*.csv"):
        assert path.stat().st_size < 20_000, path
        assert len(path.read_text().splitlines()) <= MOST_LINES.get(path.name, 60), path


def test_documents_quote_the_figures_of_decompositions():
    lines = (BENCHMARKS / "results" / "linalg.csv").read_text().splitlines()[1:]
    kept = {(r["operator"], r["contender"]): r for r in csv.DictReader(lines) if r["batch"] == "16 MB"}
    quoted = 0
    for page in ("README.md", "docs/performance.md"):
        text = (BENCHMARKS.parent / page).read_text()
        for head, body in re.findall(r"^\| (\| n = .*)\n\|[ |-]+\n((?:\|.*\n)+)", text, re.MULTILINE):
            orders = re.findall(r"\d+", head)
            for name, *cells in (line.strip("| ").split(" | ") for line in body.splitlines()):
                operator, _, both = name.partition(", ")
                contender = "forward + backward ours, forward=True" if both == "both" else "backward ours"
                row = kept[NAMES[operator], contender]
                for n, cell in zip(orders, cells, strict=True):
                    ratios = [float(row[f"{dtype} {n}x{n} ratio"]) for dtype in ("float32", "float64")]
                    assert cell == " / ".join(f"{r:.0f}" if r >= 9.95 else f"{r:.1f}" for r in ratios), (page, name, n)
                    quoted += 1
    assert quoted == 4 * 4 + 11 * 7


def test_documents_quote_the_figures_next_to_jax():
    lines = (BENCHMARKS / "results" / "against_jax.csv").read_text().splitlines()[1:]
    rows = {(r["problem"], r["size"]): r for r in csv.DictReader(lines)}
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    head, body = re.search(r"^\| JAX / ours \| (.*)\n\|[ |-]+\n((?:\|.*\n)+)", text, re.MULTILINE).groups()
    for label, *cells in (line.strip("| ").split(" | ") for line in body.splitlines()):
        name, one = label.removesuffix(", one"), label.endswith(", one")
        operator = NAMES[name.partition(",")[0]]
        ours = "ours, forward=True" if operator != "qr" and not one else "ours"
        for n, cell in zip(re.findall(r"\d+", head), cells, strict=True):
            column = f"1 threads {'1' if one else 'several'} "
            row = {k.removeprefix(column): v for k, v in rows[operator, n].items() if k.startswith(column)}
            ratios = [float(row[f"{d} {ours} ratio"]) / float(row[f"{d} jax ratio"]) for d in ("float32", "float64")]
            assert cell == " / ".join(f"{r:.0f}" if r >= 9.95 else f"{r:.1f}" for r in ratios), (label, n)
