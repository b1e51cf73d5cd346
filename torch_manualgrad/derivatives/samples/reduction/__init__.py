"""Samples of the rules of reductions."""
