"""Samples of the rules of indexing."""
