"""Hyperbolic functions and their inverses.

Note:
    Where not differentiable: for acosh at 1 and for atanh at -1 and 1, where the derivative is infinite, as PyTorch's is.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torch_manualgrad.core.rule import elementwise


def _acosh(self: Tensor) -> Tensor:
    """(self^2 - 1)^(-1/2), on the branch on which acosh is: the principal root of the product is another."""
    if self.is_complex():
        return (self + 1).rsqrt() * (self - 1).rsqrt()
    return (self * self - 1).rsqrt()


elementwise("aten::sinh", lambda self: self.cosh())
elementwise("aten::cosh", lambda self: self.sinh())
elementwise("aten::tanh", lambda grad, result: torch.ops.aten.tanh_backward(grad, result))
elementwise("aten::asinh", lambda self: (self.pow(2) + 1).rsqrt())
elementwise("aten::acosh", lambda self: _acosh(self), domain=(1, inf))
elementwise("aten::atanh", lambda self: 1 / (1 - self * self), domain=(-1, 1))
