"""Convolution, pooling, upsampling and grid sampling: importing one enters its formulas and rules in the registries."""

from . import (
    backends,
    convolution,
    grid_sampler,
    pooling,
    unfold,
    upsample,
)
