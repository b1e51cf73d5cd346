"""The larger and the smaller of two numbers.

Where an input is not the result, its gradient is zero, whatever the cotangent: nan times zero is zero here.

Note:
    Where not differentiable: where the two are equal, PyTorch's conventions. maximum and minimum have 1/2 in each there,
    and so have fmax and fmin from torch 2.15 on; before, the first has all.
"""

from __future__ import annotations

from torch import Tensor

from torch_manualgrad.core.rule import always, elementwise, reached

from .clamp import part

_SHARED = reached("2.15")


def _larger(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cotangent of x, given that of max(x, y); of both, where one is nan."""
    return part(grad, ~(x <= y), x == y)


def _first(grad: Tensor, chosen: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cotangent of x, given that of fmax(x, y) or fmin(x, y), where it is chosen; nan is chosen last."""
    chosen, tie = chosen | y.isnan(), x == y
    return part(grad, chosen, tie) if _SHARED else part(grad, chosen | tie)


def _second(grad: Tensor, chosen: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """That of y, where x is chosen."""
    tie = x == y
    return part(grad, ~(chosen | tie | y.isnan()), tie if _SHARED else None)


elementwise(
    "aten::maximum",
    {
        "self": lambda grad, self, other: _larger(grad, self, other),
        "other": lambda grad, self, other: _larger(grad, other, self),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::minimum",
    {
        "self": lambda grad, self, other: _larger(grad, other, self),
        "other": lambda grad, self, other: _larger(grad, self, other),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::fmax",
    {
        "self": lambda grad, self, other: _first(grad, self > other, self, other),
        "other": lambda grad, self, other: _second(grad, self > other, self, other),
    },
    real_only=True,
    finite=True,
    improves={"values": "2.15"},  # in forward mode the second has all
    defer_to_stock=always,
)
elementwise(
    "aten::fmin",
    {
        "self": lambda grad, self, other: _first(grad, self < other, self, other),
        "other": lambda grad, self, other: _second(grad, self < other, self, other),
    },
    real_only=True,
    finite=True,
)
