"""Samples of the rules of sparse tensors."""
