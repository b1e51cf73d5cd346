"""Trigonometric and hyperbolic functions and their inverses.

Note:
    Where not differentiable: at the ends of the domains of acos, asin, acosh and atanh, where the derivative is infinite;
    at the poles of tan; for atan2 at the origin, where it is zero by convention. PyTorch does the same, except that its
    tangent and its second order of atan2 are nan at the origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Ratio, bind, elementwise, formula


@formula
def atan2_backward(grad: Tensor, self: Tensor, other: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Cotangents of $y$ and $x$, given that of the angle $atan2(y, x)$: $g x / (x^2 + y^2)$ and $-g y / (x^2 + y^2)$.

    Args:
        grad: cotangent of the result.
        self: $y$, real.
        other: $x$, broadcast with $y$.
        output_mask: which of the two are wanted.

    Returns:
        Two tensors of the shape of ``grad``, not yet summed to the shapes of $y$ and $x$; zeros if they are not wanted.

    Note:
        Where not differentiable: at the origin, where every order is 0.
    """
    wanted = zip(output_mask, (_angle_slope(other, self, other), -_angle_slope(self, self, other)))
    y, x = (grad * slope if needed else torch.zeros_like(grad) for needed, slope in wanted)
    return y, x


def _angle_slope(part: Tensor, self: Tensor, other: Tensor) -> Tensor:
    """$part / (self^2 + other^2)$, without overflow in the squares; zero at the origin."""
    origin = (self == 0) & (other == 0)
    length = torch.hypot(self, torch.where(origin, 1, other))
    return torch.where(origin, 0, part) / length / length


def _acosh(self: Tensor) -> Tensor:
    """$(self^2 - 1)^(-1/2)$ on the branch of acosh, which is not the principal root of the product."""
    if self.is_complex():
        return (self + 1).rsqrt() * (self - 1).rsqrt()
    return (self * self - 1).rsqrt()


# -- the rules --------------------------------------------------------------------------------------------------------

elementwise("aten::sin", lambda self: self.cos())
elementwise("aten::cos", lambda self: -self.sin())
elementwise("aten::tan", lambda result: 1 + result.pow(2), domain=(-1.2, 1.2))
elementwise("aten::asin", lambda self: (-self * self + 1).rsqrt(), domain=(-1, 1))
elementwise("aten::acos", lambda self: -(-self * self + 1).rsqrt(), domain=(-1, 1))
elementwise("aten::atan", lambda self: Ratio(1, self * self + 1))
elementwise(
    "aten::atan2",
    {"self": bind(_angle_slope, part="other"), "other": lambda self, other: -_angle_slope(self, self, other)},
    domain={"self": (-inf, inf), "other": (0, inf)},
    real_only=True,
    improves="values",
)
elementwise("aten::sinh", lambda self: self.cosh())
elementwise("aten::cosh", lambda self: self.sinh())
elementwise("aten::tanh", bind(torch.ops.aten.tanh_backward.default, grad_output="grad", output="result"))
elementwise("aten::asinh", lambda self: (self.pow(2) + 1).rsqrt())
elementwise("aten::acosh", _acosh, domain=(1, inf))
elementwise("aten::atanh", lambda self: 1 / (1 - self * self), domain=(-1, 1))
