"""Every family of elementwise operators: importing one enters its rules in the registry."""

from . import (
    activations,
    arithmetic,
    bessel,
    clamp,
    copies,
    dirichlet,
    fake_quantize,
    foreach,
    glu,
    incomplete_gamma,
    logarithms,
    piecewise,
    powers,
    rounding_and_sign,
    selection,
    softmax,
    special_functions,
    strong_times,
    trigonometric,
    zeta,
)
