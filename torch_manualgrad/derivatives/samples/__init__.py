"""Samples and probes of the rules, a file for each family. Imported when the samples of a rule are first read."""

from . import convolution, elementwise, fft, indexing, linalg, loss, nn, recurrent, reduction, shape, sparse

__all__ = [
    "convolution",
    "elementwise",
    "fft",
    "indexing",
    "linalg",
    "loss",
    "nn",
    "recurrent",
    "reduction",
    "shape",
    "sparse",
]
