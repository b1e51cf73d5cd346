"""Sparse tensors: importing a module enters its formulas and rules in the registries."""

from . import construction, masks, products, sums
