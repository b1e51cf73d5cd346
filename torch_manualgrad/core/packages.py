"""Rules, formulas and samples of other packages: modules named by the entry points of one group.

They are imported when the registry of rules is first read, not when this package is imported. By then, a package that
imports this one at its top is complete.
"""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points

__all__ = ["GROUP", "load"]

GROUP = "torch_manualgrad.derivatives"

_loaded = False


def load() -> None:
    """Import the modules of the group, once per process. A warning names each that raises."""
    global _loaded
    if _loaded:
        return
    _loaded = True  # first: the modules may read rules themselves
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.name
            warnings.warn(
                f"{package}: its rules may be missing, as {entry.value} could not be imported "
                f"({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=2,
            )
