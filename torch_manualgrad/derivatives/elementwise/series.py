"""Polynomials of a tensor, Stirling's series and a quadrature, for functions without their own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

import torch
from torch import Tensor

# log Gamma(z) = (z - 1/2) log z - z + log(2 pi) / 2 + sum of c_k z^-(2k + 1), with all digits from z = FAR on
STIRLING = [1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400]
DIGAMMA = [-(2 * k + 1) * c for k, c in enumerate(STIRLING)]  # its derivative
FAR = 10


def polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The sum of $c_k x^k$, by Horner's scheme.

    Args:
        coefficients: $c_0$, $c_1$, ...; two or more.
        x: of any shape, real or complex.

    Returns:
        The shape and dtype of ``x``.
    """
    *rest, last = coefficients
    total = x * last
    for c in reversed(rest[1:]):
        total = (total + c) * x
    return total + rest[0]


def digamma(a: Tensor) -> Tensor:
    """$psi(a)$ for $a > 0$, by Stirling's series at $a + 10$ or $a$; every derivative has all digits.

    Args:
        a: of any shape, real.

    Returns:
        The shape and dtype of ``a``.
    """
    far = a >= FAR
    z = torch.where(far, a, a + FAR)
    square = 1 / (z * z)
    below = torch.where(far, 1, a).unsqueeze(-1) + torch.arange(FAR, dtype=a.dtype, device=a.device)
    return z.log() - 1 / (2 * z) + square * polynomial(DIGAMMA, square) - torch.where(far, 0, (1 / below).sum(-1))


def gauss_legendre(n: int) -> tuple[list[float], list[float]]:
    """The nodes and weights of Gauss-Legendre quadrature with $n$ nodes on (0, 1), by Newton's method.

    Args:
        n: the number of nodes.

    Returns:
        The nodes and the weights.
    """
    nodes, weights = [], []
    for i in range(n):
        x = cos(pi * (i + 0.75) / (n + 0.5))
        for _ in range(6):
            before, value = 1.0, x
            for k in range(2, n + 1):
                before, value = value, ((2 * k - 1) * x * value - (k - 1) * before) / k
            slope = n * (x * value - before) / (x * x - 1)
            x -= value / slope
        nodes.append((1 + x) / 2)
        weights.append(1 / ((1 - x * x) * slope * slope))
    return nodes, weights
