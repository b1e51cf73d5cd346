"""Every family of reductions: importing one enters its formulas and rules in the registries."""

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
