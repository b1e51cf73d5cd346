"""Indexing, by tensors of indices or masks: importing a module enters its formulas and rules in the registries."""

from . import embedding, embedding_bag, index, masked, scatter, scatter_reduce, slices
