"""Samples of the rules of sparse tensors."""

from . import construction, masks, products, reduced, sums

__all__ = ["construction", "masks", "products", "reduced", "sums"]
