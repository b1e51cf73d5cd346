"""Formulas and rules of neural network layers. Importing a module registers them."""

from . import attention, attention_on_gpus, batch_norm, dropout, group_norm, layer_norm, rms_norm, weight_norm
