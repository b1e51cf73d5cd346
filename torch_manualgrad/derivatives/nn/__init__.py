"""The families of neural network layers: importing one enters its formulas and rules in the registries."""

from . import attention, attention_on_gpus, batch_norm, dropout, group_norm, layer_norm, rms_norm, weight_norm
