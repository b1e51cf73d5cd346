"""The families of neural network layers: importing one enters its formulas and rules in the registries."""

from . import attention, batch_norm, dropout, group_norm, layer_norm, rms_norm, weight_norm
