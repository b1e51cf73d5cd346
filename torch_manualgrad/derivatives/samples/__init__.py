"""Samples and probes of the rules, a file for each family. Imported when the samples of a rule are first read."""

from . import fft, linalg, loss, nn, recurrent, sparse

__all__ = ["fft", "linalg", "loss", "nn", "recurrent", "sparse"]
