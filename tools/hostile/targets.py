"""Everything that is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch_manualgrad as mg

from .calls import Target, formula_targets
from .generated import generated
from .public import public_targets
from .recorded import recorded

__all__ = ["targets"]


def targets(rules: Sequence[str] | None = None) -> list[Target]:
    """Formulas and public functions.

    Args:
        rules: those whose samples give valid calls; None for all of them.
    """
    public = public_targets()
    calls = recorded(public, rules)
    for formula in mg.ops.values():
        if formula.name not in calls:
            calls[formula.name] = generated(formula)
    return [*formula_targets(calls), *public]
