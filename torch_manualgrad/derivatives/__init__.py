"""The formulas and the rules, one file a family; importing this package registers all of them."""

from . import catalogue, elementwise, linalg, loss, nn, reduction

from . import flops  # isort: skip  # last: it counts the formulas of the others

__all__ = ["catalogue", "elementwise", "flops", "linalg", "loss", "nn", "reduction"]
from . import indexing, shape

__all__ = ["catalogue", "elementwise", "flops", "indexing", "linalg", "nn", "reduction", "shape"]
from . import convolution

__all__ = ["catalogue", "convolution", "elementwise", "flops", "linalg", "nn", "reduction"]
from . import fft, recurrent, sparse

__all__ = ["catalogue", "elementwise", "fft", "flops", "linalg", "nn", "recurrent", "reduction", "sparse"]
