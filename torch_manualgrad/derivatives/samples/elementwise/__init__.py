"""Samples of the rules of elementwise operators."""

from . import (
    activations,
    arithmetic,
    clamp,
    copies,
    dirichlet,
    fake_quantize,
    foreach,
    glu,
    incomplete_gamma,
    piecewise,
    rounding_and_sign,
    selection,
    softmax,
    zeta,
)

__all__ = [
    "activations",
    "arithmetic",
    "clamp",
    "copies",
    "dirichlet",
    "fake_quantize",
    "foreach",
    "glu",
    "incomplete_gamma",
    "piecewise",
    "rounding_and_sign",
    "selection",
    "softmax",
    "zeta",
]
