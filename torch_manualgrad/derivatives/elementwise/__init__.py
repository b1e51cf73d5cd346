"""Every family of elementwise operators: importing one enters its rules in the registry."""

from . import arithmetic, bessel, hyperbolic, logarithms, powers, special_functions, trigonometric

__all__ = ["arithmetic", "bessel", "hyperbolic", "logarithms", "powers", "special_functions", "trigonometric"]
