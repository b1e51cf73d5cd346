"""The families of losses: importing one enters its formulas and rules in the registries."""

from . import binary_cross_entropy, ctc, linear_cross_entropy, margin, multi_margin, nll, regression
