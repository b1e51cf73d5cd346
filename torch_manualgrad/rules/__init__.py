"""The formulas and the rules, one file a family; importing this package registers all of them."""

from . import distance, norm

__all__ = ["distance", "norm"]
