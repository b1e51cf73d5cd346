"""Samples of the rules of linear algebra."""

from . import lu

__all__ = ["lu"]
