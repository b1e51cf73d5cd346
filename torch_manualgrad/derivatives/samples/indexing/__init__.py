"""Samples of the rules of indexing."""

from . import embedding, embedding_bag, index, masked, scatter, scatter_reduce, slices

__all__ = ["embedding", "embedding_bag", "index", "masked", "scatter", "scatter_reduce", "slices"]
