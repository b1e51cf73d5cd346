"""The Hurwitz zeta function $zeta(s, x)$, the sum of $(x + n)^-s$ over $n = 0, 1, ...$, for $s > 1$ and $x > 0$.

Its derivative in $x$ is $-s zeta(s + 1, x)$. Its derivative in $s$ is that of the Euler-Maclaurin formula, term by term. This
consists of logarithms and powers, so it can be differentiated again. Its relative error is below $1e-13$ in double precision
for $1 < s <= 60$.

Note:
    Where not differentiable: at $s = 1$, the pole, and at $x = 0, -1, ...$; the result is nan for $s < 1$ and for
    $x <= 0$.

References:
    Johansson, Rigorous high-precision computation of the Hurwitz zeta function and its derivatives, arXiv:1309.2877,
    equation 4.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb, factorial, inf, nan

import torch
from torch import Tensor

from torch_manualgrad.core.rule import elementwise, formula

_TERMS = 12  # terms that are summed directly
_CORRECTIONS = 12


def _corrections() -> list[float]:
    """$B_(2 k) / (2 k)!$ of Bernoulli's numbers."""
    bernoulli: list[Fraction] = []
    for n in range(2 * _CORRECTIONS + 1):
        rest = sum((comb(n + 1, k) * b for k, b in enumerate(bernoulli)), Fraction(0))
        bernoulli.append((int(n == 0) - rest) / (n + 1))
    return [float(bernoulli[2 * k] / factorial(2 * k)) for k in range(1, _CORRECTIONS + 1)]


_COEFFICIENTS = _corrections()


@formula
def zeta_self_derivative(s: Tensor, x: Tensor) -> Tensor:
    """The derivative of $zeta(s, x)$ in $s$.

    Args:
        s: real, greater than 1.
        x: positive, broadcast with $s$.

    Returns:
        The shape to which they broadcast; nan where either is out of its range.

    Note:
        Where not differentiable: at $s = 1$.

    References:
        The derivative in s of Johansson, arXiv:1309.2877, equation 4.
    """
    outside = (s <= 1) | (x <= 0)
    s, x = torch.where(outside, 2, s), torch.where(outside, 1, x)
    shifts = torch.arange(_TERMS, dtype=x.dtype, device=x.device)
    n = x.unsqueeze(-1) + shifts
    total = -(n.log() * n.pow(-s.unsqueeze(-1))).sum(-1)
    a = x + _TERMS
    log, power = a.log(), a.pow(-s)
    total = total - power * (a * (log / (s - 1) + (s - 1).pow(-2)) + log / 2)
    product, slope = s, torch.ones_like(s)  # s (s + 1) ... (s + 2 k - 2), and its derivative
    power = power / a
    for k, c in enumerate(_COEFFICIENTS):
        total = total + c * power * (slope - product * log)
        for j in (2 * k + 1, 2 * k + 2):
            product, slope = product * (s + j), slope * (s + j) + product
        power = power / (a * a)
    return torch.where(outside, nan, total)


def _other_slope(s: Tensor, other: Tensor) -> Tensor:
    """$-s zeta(s + 1, x)$."""
    return -s * torch.special.zeta(s + 1, other)


elementwise(
    "aten::special_zeta",
    {
        "self": lambda self, other: zeta_self_derivative(self, other.to(self.dtype)),
        "other": lambda self, other: _other_slope(self.to(other.dtype), other),
    },
    improves="missing",
)
elementwise(
    "aten::special_zeta.self_scalar",
    lambda self, other: -self * torch.special.zeta(self + 1, other),
    domain=(0, inf),
    real_only=True,
    arguments=[{"self": 2.5}],
    improves="missing",
)
elementwise(
    "aten::special_zeta.other_scalar",
    lambda self, other: zeta_self_derivative(self, self.new_full((), other)),
    domain=(1, inf),
    real_only=True,
    arguments=[{"other": 2.5}],
    improves="missing",
)
