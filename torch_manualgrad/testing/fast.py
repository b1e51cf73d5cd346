"""What is run where a second is much: pytest's ``--derivatives-fast`` and ``manualgrad check --fast``."""

from __future__ import annotations

from .checks import CHECKS

FAST_MODES: tuple[str, ...] = ("rev", "fwd", "rev-rev")
#: All that are run by default, but `opcheck`, which compiles.
FAST_CHECKS: tuple[str, ...] = tuple(name for name in CHECKS if name != "opcheck")
