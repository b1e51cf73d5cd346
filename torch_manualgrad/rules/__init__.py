"""The formulas and the rules, one file a family; importing this package registers all of them."""

from . import distance, linalg, norm

__all__ = ["distance", "linalg", "norm"]
