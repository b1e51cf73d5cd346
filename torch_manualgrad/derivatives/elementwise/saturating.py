"""Building blocks of other formulas that are accurate in every order where they saturate.

The sigmoid $s$ has $s' = s (1 - s)$, which is only rounding error where $s$ is close to 1. The same holds for $1 - tanh^2$. The
functions here are written so that their derivatives by autograd, in any order, contain no such difference.
"""

from __future__ import annotations

from math import log, pi, sqrt

import torch
from torch import Tensor

__all__ = ["logistic", "logistic_base_2", "logistic_slope", "normal_density", "normal_exponential"]

aten = torch.ops.aten


def logistic(x: Tensor) -> Tensor:
    """$s(x)$, the sigmoid; its derivative is `logistic_slope`, that of the rule of log_sigmoid_backward."""
    if x.is_complex():
        right, e = _decaying(x)
        return torch.where(right, 1, e) / (1 + e)
    return aten.log_sigmoid_backward(torch.ones_like(x), -x, (-x.detach().abs()).exp())


def _decaying(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a complex $x$ is in the right half plane, and $e^(-x)$ there, else $e^x$: neither overflows."""
    right = x.real >= 0
    return right, torch.where(right, -x, x).exp()


def logistic_base_2(x: Tensor) -> Tensor:
    """$1 / (1 + 2^-x)$."""
    left = x < 0
    e = torch.exp2(torch.where(left, x, -x))
    return torch.where(left, e, 1) / (1 + e)


def logistic_slope(x: Tensor) -> Tensor:
    """$s(x) s(-x)$, with $s$ the sigmoid: $1 / (4 cosh(x / 2)^2)$ near 0, where it is even, else
    $e^(-|x|) / (1 + e^(-|x|))^2$.
    """
    if x.is_complex():
        _, e = _decaying(x)
        s = 1 / (1 + e)
        return e * s * s
    near = x.abs() < 2
    r = 1 / (torch.where(near, x, 0) / 2).cosh()
    e = (-torch.where(x < 0, -x, x)).exp()
    s = 1 / (1 + e)
    return torch.where(near, r * r / 4, e * s * s)


def normal_density(x: Tensor) -> Tensor:
    """$exp(-x^2 / 2) / sqrt(2 pi)$, of real $x$."""
    return normal_exponential(x) / sqrt(2 * pi)


def normal_exponential(x: Tensor) -> Tensor:
    """$exp(-x^2 / 2)$, of real $x$.

    The exponent is computed in two parts, because its rounding would be an error of $x^2$ units. With a constant $h$ close
    to $x$, $x^2 = h^2 + (x - h) (x + h)$, and $h^2$ is exact.
    """
    info = torch.finfo(x.dtype)
    x = _within(x, sqrt(-4 * log(info.smallest_normal)))
    digits = 2.0 ** (round(-log(info.eps, 2)) // 2 - 4)
    h = (x.detach() * digits).round() / digits
    return (-h * h / 2).exp() * ((h - x) * (h + x) / 2).exp()


def _within(x: Tensor, limit: float) -> Tensor:
    """$x$, but a constant beyond the limit, where the functions here are 0 and their parts would overflow."""
    return torch.where(x.abs() > limit, limit, x)
