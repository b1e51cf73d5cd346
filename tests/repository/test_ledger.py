"""The ledger of PyTorch's issues: what it says of this package is so on the torch that is installed."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
pytest.importorskip("ledger", reason="not a source tree")

from ledger import __main__ as ledger, entries
from ledger.programs import ENTRIES, Entry, along

ROOT = Path(__file__).resolve().parents[2]
assert entries  # they enter themselves


NUMBERS = [pytest.param(n, marks=pytest.mark.slow) if entry.slow else n for n, entry in sorted(ENTRIES.items())]


@pytest.mark.parametrize("number", NUMBERS)
def test_ours_is_as_the_table_says(number):
    (row,) = (row for row in table() if row["issue"] == str(number))
    documented = row.get(f"override {ledger.TORCH}", ledger.RIGHT)
    found = ledger.ours(ENTRIES[number])
    assert found.split(":")[0] == documented.split(":")[0]
    assert ENTRIES[number].open or found == ledger.RIGHT


def table():
    with (ROOT / "docs" / "issues.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("number", [n for n, entry in sorted(ENTRIES.items()) if entry.open])
def test_an_open_entry_is_not_right_everywhere(number):
    (row,) = (row for row in table() if row["issue"] == str(number))
    assert any(outcome != ledger.RIGHT for column, outcome in row.items() if column.startswith("override"))


def test_the_tables_have_every_entry():
    assert [int(row["issue"]) for row in table()] == sorted(ENTRIES)
    page = (ROOT / "docs" / "issues.md").read_text()
    assert all(f"[#{n}]" in page for n in ENTRIES)


@pytest.mark.parametrize(
    "program, expected, found",
    [
        (lambda: torch.ones(2), [1.0, 1.0], "right"),
        (lambda: torch.ones(2), 1.0, "right"),
        (lambda: torch.ones(2), [1.0, 3.0], "wrong: 1 for 3"),
        (lambda: torch.ones(2), [1.0], "wrong: shape [2] for [1]"),
        (lambda: torch.tensor([1.0, torch.nan]), [1.0, 1.0], "nan"),
        (lambda: torch.ones(2) @ torch.ones(3), [1.0], "raises RuntimeError"),
    ],
)
def test_outcomes(program, expected, found):
    assert ledger.outcome(program, Entry(0, "", program, expected)) == found


@pytest.mark.parametrize(
    "modes, expected", [("rev", 1.0), ("fwd", 1.0), ("fwd-func", 0.5), ("rev-rev", 0.5), ("func-fwd", 0.5)]
)
def test_derivatives_along_a_path(modes, expected):
    found = along(lambda t: t * t / 4, 2.0, modes)
    assert float(found) == expected
