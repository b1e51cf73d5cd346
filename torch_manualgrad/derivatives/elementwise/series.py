"""Polynomials of a tensor, for functions that are a quotient of small numbers where their power series is none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The sum of c_k x^k, by Horner's scheme.

    Args:
        coefficients: c_0, c_1, ...; two or more.
        x: of any shape, real or complex.

    Returns:
        The shape and dtype of ``x``.
    """
    *rest, last = coefficients
    total = x * last
    for c in reversed(rest[1:]):
        total = (total + c) * x
    return total + rest[0]
