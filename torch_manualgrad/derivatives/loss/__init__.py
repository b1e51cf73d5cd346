"""Formulas and rules of losses. Importing a module registers them."""

from . import binary_cross_entropy, ctc, linear_cross_entropy, margin, multi_margin, nll, regression
