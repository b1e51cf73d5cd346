"""The formulas and the rules, one file a family; importing this package registers all of them."""

from . import catalogue, elementwise, linalg, nn
from .reduction import distance, norm, renorm

from . import flops  # isort: skip  # last: it counts the formulas of the others

__all__ = ["catalogue", "distance", "elementwise", "flops", "linalg", "nn", "norm", "renorm"]
