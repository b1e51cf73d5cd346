"""Formulas and rules of indexing by tensors of indices or masks. Importing a module registers them."""

from . import embedding, embedding_bag, index, masked, scatter, scatter_reduce, slices
