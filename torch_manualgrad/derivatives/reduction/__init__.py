"""Formulas and rules of reductions. Importing a module registers them."""

from . import (
    cumulative,
    distance,
    extrema,
    logsumexp,
    norm,
    products,
    renorm,
    segment_reduce,
    selection,
    sums,
    variance,
)
