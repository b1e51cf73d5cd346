"""Fast tests of a large grid: every value of every axis but not every combination, or a part of the values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(first: Iterable[Any], *others: Iterable[Any], share: float = 1, start: int = 0) -> list[Any]:
    """The product of several lists of values, as parameters of a test, most of them marked as slow.

    For each value of the first list, the fast tests run ``share`` combinations of the others: the next ones each time.
    With 1/2, every second value has a fast test, from ``start``; with 0, all are slow.
    """
    combinations = list(product(*others))
    return [
        pytest.param(
            value, *rest, marks=[] if (j - (i - start) * share) % len(combinations) < share else pytest.mark.slow
        )
        for i, value in enumerate(first)
        for j, rest in enumerate(combinations)
    ]


def every(number: int, values: Iterable[Any], start: int = 0) -> list[Any]:
    """Values as parameters of a test: the fast tests run every ``number``-th, from ``start``; the others are slow.

    For several tests of all rules: with another ``start`` in each, the fast tests have every rule in one of them.
    """
    return [
        pytest.param(value, marks=[] if i % number == start % number else pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def label(value: Any) -> str:
    """The id of a parameter: the name of a rule or a function, or the value as text."""
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value).removeprefix("torch.")
