"""Every family of elementwise operators: importing one enters its rules in the registry."""

from . import hyperbolic, powers, trigonometric

__all__ = ["hyperbolic", "powers", "trigonometric"]
