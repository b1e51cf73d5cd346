"""Samples of the rules of losses."""

from . import binary_cross_entropy, ctc, linear_cross_entropy, margin, multi_margin, nll, regression

__all__ = ["binary_cross_entropy", "ctc", "linear_cross_entropy", "margin", "multi_margin", "nll", "regression"]
