"""The families of neural network layers: importing one enters its formulas and rules in the registries."""

from . import (
    attention_rules,
    dropout,
    normalization_batch_rules,
    normalization_gpu,
    normalization_group_rules,
    normalization_layer,
    normalization_rms,
    weight_norm,
)

__all__ = [
    "attention_rules",
    "dropout",
    "normalization_batch_rules",
    "normalization_gpu",
    "normalization_group_rules",
    "normalization_layer",
    "normalization_rms",
    "weight_norm",
]
