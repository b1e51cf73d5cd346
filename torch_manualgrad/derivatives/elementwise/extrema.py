"""The larger and the smaller of two numbers, and bounds.

Where an input is not the result, its gradient is zero, whatever the cotangent: nan times zero is zero here.

Note:
    Where not differentiable: where the two are equal. maximum and minimum have 1/2 in each there, fmax and fmin 1 in the
    first, and a number at its bound counts as inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.elementwise import elementwise
from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule


@formula
def clamp_backward(grad: Tensor, self: Tensor, min: Tensor | None, max: Tensor | None) -> Tensor:
    """Cotangent of x, given that of x between bounds: g where min <= x <= max, else 0.

    Args:
        grad: cotangent of the result.
        self: x, real.
        min: the lower bound, broadcast with x, or None; Python callers may give a number.
        max: the upper bound, in the same way.

    Returns:
        The shape of ``grad``, not yet summed to that of x.

    Note:
        Where not differentiable: at the bounds, where it is g.

    References:
        ATen clamp_backward.
    """
    inside = torch.ones_like(self, dtype=torch.bool)
    if min is not None:
        inside = inside & (self >= min)
    if max is not None:
        inside = inside & (self <= max)
    return torch.where(inside, grad, 0)


@formula
def clamp_backward_min_max(
    grad: Tensor, self: Tensor, min: Tensor, max: Tensor, grad_input_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Cotangents of the bounds, given that of x between them: g where x < min < max, and where x > max or max < min.

    Args:
        grad: cotangent of the result.
        self: x, real.
        min: the lower bound, broadcast with x; Python callers may give None.
        max: the upper bound, in the same way.
        grad_input_mask: which of the two are wanted.

    Returns:
        The shape of ``grad`` each, not yet summed to those of the bounds; zeros where it is not wanted.

    Note:
        Where not differentiable: x = min and x = max count as inside; of equal bounds the upper one is the result.

    References:
        ATen clamp_backward_min_max.
    """
    low = high = torch.zeros_like(grad)
    if min is not None and grad_input_mask[0]:
        low = torch.where(self < min if max is None else (self < min) & (min < max), grad, 0)
    if max is not None and grad_input_mask[1]:
        high = torch.where(self > max if min is None else (self > max) | (max < min), grad, 0)
    return low, high


@formula
def clamp_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    min_p: Tensor | None,
    min_t: Tensor | None,
    max_p: Tensor | None,
    max_t: Tensor | None,
) -> Tensor:
    """Tangent of x between bounds: that of the one of the three that is the result.

    Args:
        self_p: x, real.
        self_t: its tangent, or None.
        min_p: the lower bound, broadcast with x, or None.
        min_t: its tangent, or None.
        max_p: the upper bound, or None.
        max_t: its tangent, or None.

    Returns:
        The shape that the three broadcast to.

    Note:
        Where not differentiable: as `clamp_backward` and `clamp_backward_min_max`.

    References:
        ATen clamp_jvp.
    """
    tangent = torch.zeros_like(self_p) if self_t is None else self_t
    if max_p is not None:
        tangent = torch.where(self_p > max_p, 0 if max_t is None else max_t, tangent)
    if min_p is not None:
        tangent = torch.where(self_p < min_p, 0 if min_t is None else min_t, tangent)
    if min_p is not None and max_p is not None:
        tangent = torch.where(min_p > max_p, 0 if max_t is None else max_t, tangent)
    return tangent


def _clamp_tensor_backward(
    grad: Tensor, self: Tensor, min: Tensor | None, max: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    found = (clamp_backward(grad, self, min, max), *clamp_backward_min_max(grad, self, min, max, output_mask[1:]))
    return tuple(
        x.sum_to_size(like.shape) if like is not None and needed else None
        for x, like, needed in zip(found, (self, min, max), output_mask)
    )


def _larger(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cotangent of x, given that of max(x, y); of both, where one is nan."""
    return torch.where(x < y, 0, torch.where(x == y, grad / 2, grad))


def _clamp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.tensor([[-2.1, -0.7, 0.2, 0.9], [2.3, 0.4, -1.4, 1.6]], dtype=dtype, device=device)
    low = torch.tensor([-1.0, -0.5, 0.5, 0.1], dtype=dtype, device=device)
    high = torch.tensor([[0.6], [0.8]], dtype=dtype, device=device)
    yield from (Sample(x, low, high), Sample(x, low), Sample(x, None, high), Sample(x, high + 0.1, low[:1]))


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
        "self": lambda grad, self, other: _larger(grad, -self, -other),
        "other": lambda grad, self, other: _larger(grad, -other, -self),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::fmax",
    {
        "self": lambda self, other: (self >= other) | other.isnan(),
        "other": lambda self, other: ~((self >= other) | other.isnan()),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::fmin",
    {
        "self": lambda self, other: (self <= other) | other.isnan(),
        "other": lambda self, other: ~((self <= other) | other.isnan()),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::clamp",
    clamp_backward,
    real_only=True,
    arguments=[{"min": -1.0, "max": 0.7}, {"min": -1.0, "max": None}, {"min": None, "max": 0.7}],
    finite=True,
)
rule(
    "aten::clamp.Tensor",
    vjp={("self", "min", "max"): _clamp_tensor_backward},
    jvp={"result": clamp_jvp},
    kind="elementwise",
    uses=(clamp_backward, clamp_backward_min_max),
    source="ATen clamp_backward, clamp_backward_min_max, clamp_jvp",
    samples=_clamp_samples,
    finite=True,
)
elementwise("aten::clamp_min", lambda self, min: self >= min, real_only=True, arguments=[{"min": 0.5}], finite=True)
elementwise("aten::clamp_max", lambda self, max: self <= max, real_only=True, arguments=[{"max": 0.5}], finite=True)
elementwise(
    "aten::clamp_min.Tensor",
    {"self": lambda self, min: self >= min, "min": lambda self, min: self < min},
    real_only=True,
    finite=True,
)
elementwise(
    "aten::clamp_max.Tensor",
    {"self": lambda self, max: self <= max, "max": lambda self, max: self > max},
    real_only=True,
    finite=True,
)
