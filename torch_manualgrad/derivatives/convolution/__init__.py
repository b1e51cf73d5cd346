"""Convolution, pooling, upsampling and grid sampling: importing one enters its formulas and rules in the registries."""

from . import (
    backends,
    convolution,
    convolution_slow,
    grid_sampler_rules,
    max_pooling,
    pooling,
    unfold,
    upsample,
)

__all__ = [
    "backends",
    "convolution",
    "convolution_slow",
    "grid_sampler_rules",
    "max_pooling",
    "pooling",
    "unfold",
    "upsample",
]
