"""Samples of the rules of neural networks."""

from . import attention, batch_norm, dropout, group_norm, layer_norm, rms_norm, weight_norm

__all__ = ["attention", "batch_norm", "dropout", "group_norm", "layer_norm", "rms_norm", "weight_norm"]
