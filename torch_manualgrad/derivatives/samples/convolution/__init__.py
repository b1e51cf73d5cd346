"""Samples of the rules of convolution, pooling and sampling."""

from . import backends, convolution, grid_sampler, pooling, unfold, upsample

__all__ = ["backends", "convolution", "grid_sampler", "pooling", "unfold", "upsample"]
