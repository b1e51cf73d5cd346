"""Formulas and rules of sparse tensors. Importing a module registers them."""

from . import construction, masks, products, sums
