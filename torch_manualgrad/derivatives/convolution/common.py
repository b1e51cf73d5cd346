"""A sum of terms that may be missing."""

from __future__ import annotations

from torch import Tensor

__all__ = ["total"]


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that are not None; None if all are."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None
