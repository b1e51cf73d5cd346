"""Formulas and rules of convolution, pooling, upsampling and grid sampling. Importing a module registers them."""

from . import (
    backends,
    convolution,
    grid_sampler,
    pooling,
    unfold,
    upsample,
)
