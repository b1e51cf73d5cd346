"""Every family of reductions: importing one enters its formulas and rules in the registries."""

from . import distance, norm, renorm, segment_reduce

__all__ = ["distance", "norm", "renorm", "segment_reduce"]
