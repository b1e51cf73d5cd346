"""Everything that is called."""

from __future__ import annotations

from .calls import Target, formula_targets
from .recorded import recorded

__all__ = ["targets"]


def targets() -> list[Target]:
    """Formulas and public functions."""
    return formula_targets(recorded())
