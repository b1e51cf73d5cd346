"""Samples of the rules of operators on shapes."""

from . import cross, joining, padding, rearrangement, sequences, views

__all__ = ["cross", "joining", "padding", "rearrangement", "sequences", "views"]
