"""Samples of the rules of elementwise operators."""
