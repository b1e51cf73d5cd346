"""Numbers clamped between bounds, and the larger or the smaller of two numbers.

Where an input is not the result, its gradient is zero, whatever the cotangent: nan times zero is zero here.

Args:
    grad: cotangent of the result.
    self: $x$, real.
    max: the upper bound, of the same kind as ``min``.

Note:
    Where not differentiable, PyTorch's conventions hold. At a bound, since torch 2.15, $x$ shares the gradient with the
    bound if that is a tensor, and has no gradient if it is a number; before, $x$ has the whole gradient in both cases. Where
    the bounds are equal and $x$ differs, the bound on the side of $x$ has the whole gradient; in PyTorch before 2.15 it has
    none. If two numbers are equal,
    maximum and minimum give $1/2$ to each. So do fmax and fmin since torch 2.15; before, the first has the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, bind, elementwise, formula, reached, rule

_SHARED = reached("2.15")


def part(x: Tensor, whole: Tensor, half: Tensor | None = None) -> Tensor:
    """$x$ where ``whole`` is True, $x / 2$ where ``half`` is, and 0 elsewhere."""
    return torch.where(whole, x, 0 if half is None else torch.where(half, x / 2, 0))


def _where_self(self: Tensor, min: Any, max: Any) -> tuple[Tensor, Tensor | None]:
    """Where $x$ is the result, and where $x$ and one bound both are."""
    inside = torch.ones_like(self, dtype=torch.bool)
    if _SHARED and not isinstance(min, Tensor) and not isinstance(max, Tensor):
        if min is not None:
            inside = inside & (self > min)
        return inside if max is None else inside & (self < max), None
    if not _SHARED:
        if min is not None:
            inside = inside & (self >= min)
        return inside if max is None else inside & (self <= max), None
    low, high = _equal(self, min), _equal(self, max)
    if min is not None:
        inside = inside & ~(self < min)
    if max is not None:
        inside = inside & ~(self > max)
    if min is not None and max is not None:
        inside = inside & ~(min > max)
    return inside & (low == high), inside & (low != high)  # between equal bounds x is the result


def _where_min(self: Tensor, min: Tensor, max: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Where the lower bound is the result, and where it and $x$ both are."""
    if max is None:
        return (~(self >= min), self == min) if _SHARED else (self < min, None)
    if not _SHARED:
        return (self < min) & (min <= max), None  # where the bounds are equal, PyTorch's gradient is 0, which is wrong
    ordered = ~(min > max)
    return ordered & (self < min), ordered & (self == min) & (self != max)


def _where_max(self: Tensor, min: Tensor | None, max: Tensor) -> tuple[Tensor, Tensor | None]:
    """Where the upper bound is the result, and where it and $x$ both are."""
    if min is None:
        return (~(self <= max), self == max) if _SHARED else (self > max, None)
    return (self > max) | (max < min), (self == max) & (self != min) if _SHARED else None


def _equal(self: Tensor, bound: Any) -> Tensor:
    return torch.zeros_like(self, dtype=torch.bool) if bound is None else self == bound


@formula
def clamp_backward(grad: Tensor, self: Tensor, min: Tensor | None, max: Tensor | None) -> Tensor:
    """Cotangent of $x$, given that of $x$ between bounds: $g$ where $min < x < max$, and 0 outside.

    Args:
        min: the lower bound, broadcast with $x$, or None; Python callers may give a number.

    Returns:
        The shape of ``grad``, not yet summed to that of $x$.
    """
    return part(grad, *_where_self(self, min, max))


@formula
def clamp_backward_min_max(
    grad: Tensor, self: Tensor, min: Tensor, max: Tensor, grad_input_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Cotangents of the bounds, given that of clamped $x$: $g$ where $x < min < max$; where $x > max$ or $max < min$.

    Args:
        min: the lower bound, broadcast with $x$; Python callers may give None.
        grad_input_mask: which of the two are wanted.

    Returns:
        Two tensors of the shape of ``grad``, not yet summed to the shapes of the bounds; zeros if they are not wanted.
    """
    low = high = torch.zeros_like(grad)
    if min is not None and grad_input_mask[0]:
        low = part(grad, *_where_min(self, min, max))
    if max is not None and grad_input_mask[1]:
        high = part(grad, *_where_max(self, min, max))
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
    """Tangent of $x$ between bounds: the tangent of whichever of the three is the result.

    Args:
        self_p: $x$, real.
        self_t: its tangent, or None.
        min_p: the lower bound, broadcast with $x$, or None.
        min_t: its tangent, or None.
        max_p: the upper bound, or None.
        max_t: its tangent, or None.

    Returns:
        The shape that the three broadcast to.
    """
    terms = [part(x, *where) for x, where in _parts(self_p, self_t, min_p, min_t, max_p, max_t) if x is not None]
    return sum(terms[1:], terms[0]) if terms else torch.zeros_like(self_p)


def _parts(
    self_p: Tensor,
    self_t: Tensor | None,
    min_p: Tensor | None,
    min_t: Tensor | None,
    max_p: Tensor | None,
    max_t: Tensor | None,
) -> Iterable[tuple[Tensor | None, tuple[Tensor, Tensor | None]]]:
    """Each tangent, and where it counts, in whole and in half."""
    yield self_t, _where_self(self_p, min_p, max_p)
    if min_p is not None:
        yield min_t, _where_min(self_p, min_p, max_p)
    if max_p is not None:
        yield max_t, _where_max(self_p, min_p, max_p)


def _clamp_tensor_backward(
    grad: Tensor, self: Tensor, min: Tensor | None, max: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    found = (clamp_backward(grad, self, min, max), *clamp_backward_min_max(grad, self, min, max, output_mask[1:]))
    return tuple(
        x.sum_to_size(like.shape) if like is not None and needed else None
        for x, like, needed in zip(found, (self, min, max), output_mask)
    )


# -- the larger and the smaller of two ----------------------------------------------------------------------------------


def _larger(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cotangent of $x$, given that of $max(x, y)$; both get it where one is nan."""
    return part(grad, ~(x <= y), x == y)


def _first(grad: Tensor, chosen: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cotangent of $x$, given that of $fmax(x, y)$ or $fmin(x, y)$; ``chosen``: where $x$ is the result, nan aside."""
    chosen, tie = chosen | y.isnan(), x == y
    return part(grad, chosen, tie) if _SHARED else part(grad, chosen | tie)


def _second(grad: Tensor, chosen: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cotangent of $y$; ``chosen`` as in `_first`."""
    tie = x == y
    return part(grad, ~(chosen | tie | y.isnan()), tie if _SHARED else None)


# -- the rules --------------------------------------------------------------------------------------------------------

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
    improves={"values": "2.15"},
    source="ATen clamp_backward, clamp_backward_min_max, clamp_jvp",
    finite=True,
)
elementwise("aten::clamp_min", clamp_backward.bind(max=None), real_only=True, arguments=[{"min": 0.5}], finite=True)
elementwise("aten::clamp_max", clamp_backward.bind(min=None), real_only=True, arguments=[{"max": 0.5}], finite=True)
elementwise(
    "aten::clamp_min.Tensor",
    {
        "self": lambda grad, self, min: part(grad, *_where_self(self, min, None)),
        "min": lambda grad, self, min: part(grad, *_where_min(self, min, None)),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::clamp_max.Tensor",
    {
        "self": lambda grad, self, max: part(grad, *_where_self(self, None, max)),
        "max": lambda grad, self, max: part(grad, *_where_max(self, None, max)),
    },
    real_only=True,
    finite=True,
)
elementwise(
    "aten::maximum",
    {"self": bind(_larger, x="self", y="other"), "other": bind(_larger, x="other", y="self")},
    real_only=True,
    finite=True,
)
elementwise(
    "aten::minimum",
    {"self": bind(_larger, x="other", y="self"), "other": bind(_larger, x="self", y="other")},
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
    improves={"values": "2.15"},  # in forward mode, PyTorch gives all to the second
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
