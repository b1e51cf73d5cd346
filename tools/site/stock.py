"""The outcomes of PyTorch's own derivatives, from build/measure/stock.csv, which `tools/stock.py` measures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

__all__ = ["MEASURED", "stock"]

TABLE = Path(__file__).resolve().parents[2] / "build" / "measure" / "stock.csv"
ABSENT = "-"


def _table() -> dict[str, dict[str, str]]:
    if not TABLE.exists():
        return {}
    with TABLE.open() as file:
        return {row.pop("operator"): row for row in csv.DictReader(file)}


# operator -> torch -> "wrong: fwd-fwd; raises: fwd", or "right"; empty where it was not measured here
MEASURED = _table()


def stock(rule: Any) -> str:
    """The cell of an operator: a line for each outcome, with the torches that have it; empty where nothing is claimed."""
    if rule.name not in MEASURED:
        return "not measured" if {"values", "missing"} & {*rule.claims} else ""
    torches: dict[str, list[str]] = {}
    for torch, outcomes in MEASURED[rule.name].items():
        if outcomes != ABSENT:
            torches.setdefault(outcomes, []).append(torch)
    lines = []
    for outcomes, versions in torches.items():
        if outcomes == "right" and len(torches) == 1:
            outcomes = "right at samples, not everywhere"
        lines += [*outcomes.split("; ")[:-1], f"{outcomes.split('; ')[-1]} ({', '.join(versions)})"]
    return "<br>".join(lines)
