"""Exponentials, logarithms and roots.

Note:
    Where not differentiable: at zero for the logarithms, the roots and the reciprocal, where the derivative is infinite,
    and times a cotangent of zero it is nan, as PyTorch's is.
"""

from __future__ import annotations

from math import inf, log

from torch_manualgrad.core.elementwise import elementwise

elementwise("aten::exp", lambda result: result)
elementwise("aten::exp2", lambda result: result * log(2))
elementwise("aten::expm1", lambda result: result + 1)
elementwise("aten::log", lambda self: 1 / self, domain=(0, inf))
elementwise("aten::log2", lambda self: 1 / (self * log(2)), domain=(0, inf))
elementwise("aten::sqrt", lambda result: 0.5 / result, domain=(0, inf))
elementwise("aten::rsqrt", lambda result: -0.5 * result * result * result, domain=(0, inf))
elementwise("aten::reciprocal", lambda result: -result * result)
