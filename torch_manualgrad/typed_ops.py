"""``mg.ops``, the registry of formulas. Type checkers read the stub beside this file, which tools/stubs.py writes."""

from .core.rule import ops

__all__ = ["ops"]
