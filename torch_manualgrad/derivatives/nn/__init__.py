"""The families of neural network layers: importing one enters its formulas and rules in the registries."""

from . import normalization_batch_rules, normalization_group_rules, normalization_layer

__all__ = ["normalization_batch_rules", "normalization_group_rules", "normalization_layer"]
