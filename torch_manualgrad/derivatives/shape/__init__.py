"""Formulas and rules of operators that move entries of tensors. Importing a module registers them."""

from . import copies, cross, joining, padding, rearrangement, sequences, views
