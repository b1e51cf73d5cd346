"""Operators on lists of tensors. The derivative for each tensor is that of the operator on one tensor.

Note:
    Where not differentiable: as for the operator on one tensor. For maximum and minimum with a number, the derivative is
    $1/2$ where both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import formula, rule

from ..linalg.matmul import mm_mat1_backward, mm_mat2_backward
from ..reduction.norm import norm_backward
from .arithmetic import div_tensor_other_backward, div_tensor_self_backward
from .powers import pow_backward, pow_backward_exponent, pow_backward_self


def _each(gradient: Callable[..., Tensor], grads: Sequence[Tensor | None], xs: Sequence[Tensor], *others: Any) -> Any:
    """``gradient(grad, x, *others)`` for each $x$, in its shape and dtype.

    Lists in ``others`` have one entry for each $x$; numbers apply to all.
    """
    lists = [o if isinstance(o, (list, tuple)) else [o] * len(xs) for o in others]
    return [
        None if g is None or not _differentiable(x) else _like(x, gradient(g, x, *o))
        for g, x, *o in zip(grads, xs, *lists, strict=True)
    ]


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _like(x: Tensor, gradient: Tensor) -> Tensor:
    if gradient.is_complex() and not x.is_complex():
        gradient = gradient.real
    return gradient.sum_to_size(x.shape).to(x.dtype)


@formula
def maximum_scalar_backward(grad: Tensor, self: Tensor, scalar: Number) -> Tensor:
    """Cotangent of $x$, given that of $max(x, c)$: $g$ where $x > c$, $g / 2$ where $x = c$, else 0.

    Args:
        grad: $g$, cotangent of the result.
        self: $x$, real.
        scalar: $c$.

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at $x = c$, where it is $g / 2$.

    References:
        ATen derivatives.yaml, _foreach_maximum.Scalar.
    """
    return torch.where(self < scalar, 0, torch.where(self == scalar, grad / 2, grad))


def _minimum_scalar_backward(grad: Tensor, self: Tensor, scalar: Number) -> Tensor:
    return maximum_scalar_backward(grad, -self, -scalar)


_UNBATCHED = dict.fromkeys(("vmap", "vmap-grad"), "vmap takes no operator on lists of tensors")

rule(
    "aten::_foreach_div.List",
    vjp={
        "self": lambda grad, self, other: _each(
            lambda g, x, y: div_tensor_self_backward(g, y, g.dtype), grad, self, other
        ),
        "other": lambda grad, self, other: _each(
            lambda g, y, x: div_tensor_other_backward(g, x, y.to(g.dtype)), grad, other, self
        ),
    },
    source="ATen derivatives.yaml",
    gaps=_UNBATCHED,
)
for name, slope in (("maximum", maximum_scalar_backward), ("minimum", _minimum_scalar_backward)):
    rule(
        f"aten::_foreach_{name}.Scalar",
        vjp={"self": lambda grad, self, scalar, *, slope=slope: _each(slope, grad, self, scalar)},
        improves="values",
        source="ATen derivatives.yaml, whose tangent is wrong",
        gaps=_UNBATCHED,
    )
    rule(
        f"aten::_foreach_{name}.ScalarList",
        vjp={"self": lambda grad, self, scalars, *, slope=slope: _each(slope, grad, self, scalars)},
        improves="values",
        source="ATen derivatives.yaml, whose tangent is wrong",
        gaps=_UNBATCHED,
    )
rule(
    "aten::_foreach_pow.List",
    vjp={
        "self": lambda grad, self, exponent: _each(pow_backward_self, grad, self, exponent),
        "exponent": lambda grad, self, exponent, result: _each(
            lambda g, y, x, r: pow_backward_exponent(g, x, y, r), grad, exponent, self, result
        ),
    },
    improves="values",
    source="ATen derivatives.yaml",
    gaps=_UNBATCHED,
)
rule(
    "aten::_foreach_pow.ScalarList",
    vjp={"self": lambda grad, self, exponent: _each(pow_backward, grad, self, exponent)},
    source="ATen derivatives.yaml",
    gaps=_UNBATCHED,
)
rule(
    "aten::_foreach_pow.ScalarAndTensor",
    vjp={
        "exponent": lambda grad, self, exponent, result: _each(
            lambda g, y, r, x: pow_backward_exponent(g, x, y, r), grad, exponent, result, self
        )
    },
    improves="missing",
    source="ATen derivatives.yaml",
    gaps=_UNBATCHED,
)
rule(
    "aten::_foreach_norm.Scalar",
    vjp={
        "self": lambda grad, self, ord, result: _each(
            lambda g, x, p, norm: norm_backward(g, x, p, norm), grad, self, ord, result
        )
    },
    improves="values",
    source="ATen norm_backward",
    gaps=_UNBATCHED,
)
rule(
    "aten::_foreach_mm",
    vjp={
        "self": lambda grad, self, mat2: _each(lambda g, x, y: mm_mat1_backward(g, y, x.stride()), grad, self, mat2),
        "mat2": lambda grad, self, mat2: _each(lambda g, y, x: mm_mat2_backward(g, x, y.stride()), grad, mat2, self),
    },
    improves="missing",
    source="ATen mm_mat1_backward, mm_mat2_backward",
    gaps=_UNBATCHED,
    since="2.13",
)
