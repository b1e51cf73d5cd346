"""Formulas and rules of operators that move entries of tensors. Importing a module registers them."""

from . import cross, joining, padding, rearrangement, sequences, views
