"""The entries: each a sample of what an issue of pytorch/pytorch reports. Importing a module enters its own."""

from . import forward, kinks, linear_algebra, missing, nested, replacing, strong_zeros, tails  # noqa: F401
