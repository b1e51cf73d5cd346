"""Samples of the rules of neural networks."""
