"""Every family of elementwise operators: importing one enters its rules in the registry."""

from . import (
    activations,
    arithmetic,
    bessel,
    copies,
    extrema,
    glu,
    hyperbolic,
    logarithms,
    piecewise,
    powers,
    products,
    rounding_and_sign,
    selection,
    softmax,
    special_functions,
    trigonometric,
)

__all__ = [
    "activations",
    "arithmetic",
    "bessel",
    "copies",
    "extrema",
    "glu",
    "hyperbolic",
    "logarithms",
    "piecewise",
    "powers",
    "products",
    "rounding_and_sign",
    "selection",
    "softmax",
    "special_functions",
    "trigonometric",
]
