"""Samples of the rules of reductions."""

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

__all__ = [
    "cumulative",
    "distance",
    "extrema",
    "logsumexp",
    "norm",
    "products",
    "renorm",
    "segment_reduce",
    "selection",
    "sums",
    "variance",
]
