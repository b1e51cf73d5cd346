"""$x log y$ and similar functions, sums of exponentials, log-odds.

Note:
    Where not differentiable: for $x log y$ at $x = 0$ and $y = 0$, where the derivative is 0 in both, in every order,
    as the function is zero for all $y$; PyTorch's derivative in $y$ is nan. For logaddexp of equal infinities it is
    $1/2$ in each; PyTorch's is nan.
"""

from __future__ import annotations

from math import inf, nan

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import Ratio, bind, elementwise, formula, where_finite

from .saturating import logistic, logistic_base_2


@formula
def infinitely_differentiable_logit_backward(grad: Tensor, self: Tensor, eps: float | None) -> Tensor:
    """Cotangent of $x$, given that of $log(x / (1 - x))$: $g / (x (1 - x))$.

    Args:
        grad: cotangent of the result.
        self: $x$, real.
        eps: None, or $x$ was clamped to $[eps, 1 - eps]$.

    Returns:
        The shape of ``grad``; zero outside of $[eps, 1 - eps]$, or without ``eps``, nan outside of $[0, 1]$.

    Note:
        Where not differentiable: at the ends of the interval, which count as inside.
    """
    low = 0.0 if eps is None else eps
    inside = (self >= low) & (self <= 1 - low)
    # two quotients: with one, the second derivative would have the square of x (1 - x), which underflows
    x = torch.where(inside, self, 0.5) + 0.0  # -0.0 counts as 0.0
    found = grad / x + grad / (1 - x)
    if eps is None:
        # nan outside, in every order; but a strong zero times it is zero
        return found + grad * (self * torch.where(inside, 0, nan).to(self.dtype)).expm1()
    return torch.where(inside, found, 0.0)


def _times_log(grad: Tensor, self: Tensor, other: Tensor | Number) -> Tensor:
    """$grad log(other)$, but 0 where grad is 0, and where $self = 0$ and other $<= 0$."""
    return torch.special.xlogy(grad, torch.where((self == 0) & (other <= 0), 1, other))


def _times_log1p(grad: Tensor, self: Tensor, other: Tensor | Number) -> Tensor:
    """$grad log(1 + other)$, but 0 where grad is 0, and where $self = 0$ and other $<= -1$."""
    return torch.special.xlog1py(grad, torch.where((self == 0) & (other <= -1), 0, other))


def _ratio(x: Tensor | Number, y: Tensor) -> Ratio:
    """$x / y$, and $0 / 0 = 0$ in every order."""
    return Ratio(x, torch.where((y == 0) & (x == 0), inf, y))


def _difference(x: Tensor, y: Tensor) -> Tensor:
    """$x - y$, and 0 where both are the same infinity; booleans have no difference."""
    return torch.where((x == y) & ~x.isfinite(), 0, x + y * -1.0)


elementwise(
    "aten::xlogy.Tensor",
    {"self": _times_log, "other": bind(_ratio, x="self", y="other")},
    domain={"other": (0, inf)},
    real_only=True,
    improves="values",
    defer_to_stock=where_finite,
)
elementwise(
    "aten::xlogy.Scalar_Self",
    bind(_ratio, x="self", y="other"),
    domain=(0, inf),
    real_only=True,
    arguments=[{"self": 2.5}],
    improves="values",
    defer_to_stock=where_finite,
)
elementwise("aten::xlogy.Scalar_Other", _times_log, real_only=True, arguments=[{"other": 2.5}])
elementwise(
    "aten::special_xlog1py",
    {"self": _times_log1p, "other": lambda self, other: _ratio(self, 1 + other)},
    domain={"other": (-1, inf)},
    real_only=True,
    improves="values",
    defer_to_stock=where_finite,
)
elementwise(
    "aten::special_xlog1py.self_scalar",
    lambda self, other: _ratio(self, 1 + other),
    domain=(-1, inf),
    real_only=True,
    arguments=[{"self": 2.5}],
    improves="values",
    defer_to_stock=where_finite,
)
elementwise("aten::special_xlog1py.other_scalar", _times_log1p, real_only=True, arguments=[{"other": 1.5}])
elementwise(
    "aten::logaddexp",
    {
        "self": lambda self, other: logistic(_difference(self, other)),
        "other": lambda self, other: logistic(_difference(other, self)),
    },
    improves="values",
)
elementwise(
    "aten::logaddexp2",
    {
        "self": lambda self, other: logistic_base_2(_difference(self, other)),
        "other": lambda self, other: logistic_base_2(_difference(other, self)),
    },
    real_only=True,
    improves="values",
)
elementwise(
    "aten::logit",
    infinitely_differentiable_logit_backward,
    domain=(0, 1),
    real_only=True,
    arguments=[{}, {"eps": 0.15}],
    improves="values",
)
elementwise("aten::special_entr", lambda self: -(1 + self.log()), domain=(0, inf), real_only=True)
