"""Samples and probes of the rules, a file for each family. Imported when the samples of a rule are first read."""

from . import linalg

__all__ = ["linalg"]
