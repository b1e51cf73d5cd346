"""The formulas and the rules, one file a family; importing this package registers all of them."""

from . import catalogue, elementwise, fft, linalg, nn, recurrent, reduction, sparse

from . import flops  # isort: skip  # last: it counts the formulas of the others

__all__ = ["catalogue", "elementwise", "fft", "flops", "linalg", "nn", "recurrent", "reduction", "sparse"]
