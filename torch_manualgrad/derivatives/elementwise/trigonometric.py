"""Trigonometric functions and their inverses.

Note:
    Where not differentiable: at the ends of the domains of acos and asin, where the derivative is infinite; at the poles
    of tan; for atan2 at the origin, where it is zero by convention. PyTorch's are the same.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torch_manualgrad.core.elementwise import elementwise


def _over_square(x: Tensor, self: Tensor, other: Tensor) -> Tensor:
    """x / (self^2 + other^2); zero at the origin."""
    square = self * self + other * other
    return x / torch.where(square == 0, inf, square)


elementwise("aten::sin", lambda self: self.cos())
elementwise("aten::cos", lambda self: -self.sin())
elementwise("aten::tan", lambda result: 1 + result * result, domain=(-1.2, 1.2))
elementwise("aten::asin", lambda self: (1 - self * self).rsqrt(), domain=(-1, 1))
elementwise("aten::acos", lambda self: -(1 - self * self).rsqrt(), domain=(-1, 1))
elementwise("aten::atan", lambda self: 1 / (self * self + 1))
elementwise(
    "aten::atan2",
    {
        "self": lambda self, other: _over_square(other, self, other),
        "other": lambda self, other: _over_square(-self, self, other),
    },
    domain={"self": (-inf, inf), "other": (0, inf)},
    real_only=True,
)
