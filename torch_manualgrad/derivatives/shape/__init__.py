"""Entries of tensors in other places: importing a module enters its formulas and rules in the registries."""

from . import cross, joining, padding, rearrangement, sequences, views
