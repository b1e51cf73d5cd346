"""Every family of elementwise operators: importing one enters its rules in the registry."""

from . import (
    activations,
    arithmetic,
    bessel,
    extrema,
    glu,
    hyperbolic,
    logarithms,
    piecewise,
    powers,
    rounding_and_sign,
    softmax,
    special_functions,
    trigonometric,
)

__all__ = [
    "activations",
    "arithmetic",
    "bessel",
    "extrema",
    "glu",
    "hyperbolic",
    "logarithms",
    "piecewise",
    "powers",
    "rounding_and_sign",
    "softmax",
    "special_functions",
    "trigonometric",
]
