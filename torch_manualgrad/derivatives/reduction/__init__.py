"""Every family of reductions: importing one enters its formulas and rules in the registries."""

from . import distance, norm, renorm

__all__ = ["distance", "norm", "renorm"]
