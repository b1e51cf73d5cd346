"""Operators on lists of tensors, one after the other, with the derivative of each.

Note:
    Where not differentiable: as the operator on one tensor. maximum and minimum with a number have 1/2 where both are
    equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import Sample, formula, rule

from ..linalg.matmul import mm_mat1_backward, mm_mat2_backward
from ..reduction.norm import norm_backward
from .powers import pow_backward, pow_backward_exponent, pow_backward_self
from .products import div_tensor_other_backward, div_tensor_self_backward

Samples = Callable[[torch.dtype, torch.device | str], Iterable[Sample]]


def _each(gradient: Callable[..., Tensor], grads: Sequence[Tensor | None], xs: Sequence[Tensor], *others: Any) -> Any:
    """gradient(grad, x, *others) of each x, in its shape and dtype; other lists go along, numbers are for all."""
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


def _from(f: Callable[[Tensor, Tensor], tuple[Any, ...]], real_only: bool = False) -> Samples:
    """Samples made of two lists of matrices with positive entries; one matrix has a single column."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex and real_only:
            return
        x = torch.linspace(0.4, 2.3, 6, dtype=torch.float64, device=device).reshape(2, 3)
        y = x.flip(1) + 0.3
        if dtype.is_complex:
            x, y = torch.complex(x, y / 3), torch.complex(y, x / 4)
        yield Sample(*f([x.to(dtype), x[:, 1].to(dtype)], [y.to(dtype), y[1, 1].to(dtype)]))

    return samples


@formula
def maximum_scalar_backward(grad: Tensor, self: Tensor, scalar: Number) -> Tensor:
    """Cotangent of x, given that of max(x, c): g where x > c, g / 2 where x = c, else 0.

    Args:
        grad: g, cotangent of the result.
        self: x, real.
        scalar: c.

    Returns:
        The shape of ``grad``.

    Note:
        Where not differentiable: at x = c, where it is g / 2.

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
    samples=_from(lambda x, y: (x, y)),
)
for name, slope in (("maximum", maximum_scalar_backward), ("minimum", _minimum_scalar_backward)):
    rule(
        f"aten::_foreach_{name}.Scalar",
        vjp={"self": lambda grad, self, scalar, *, slope=slope: _each(slope, grad, self, scalar)},
        improves="values",
        source="ATen derivatives.yaml, whose tangent is wrong",
        gaps=_UNBATCHED,
        samples=_from(lambda x, y: (x, 1.3), real_only=True),
    )
    rule(
        f"aten::_foreach_{name}.ScalarList",
        vjp={"self": lambda grad, self, scalars, *, slope=slope: _each(slope, grad, self, scalars)},
        improves="values",
        source="ATen derivatives.yaml, whose tangent is wrong",
        gaps=_UNBATCHED,
        samples=_from(lambda x, y: (x, [1.3, 0.9]), real_only=True),
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
    samples=_from(lambda x, y: (x, y)),
)
rule(
    "aten::_foreach_pow.ScalarList",
    vjp={"self": lambda grad, self, exponent: _each(pow_backward, grad, self, exponent)},
    source="ATen derivatives.yaml",
    gaps=_UNBATCHED,
    samples=_from(lambda x, y: (x, [2.5, 3])),
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
    samples=_from(lambda x, y: (2.5, x)),
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
    samples=lambda dtype, device: [
        *_from(lambda x, y: (x, 3))(dtype, device),
        *_from(lambda x, y: (x,))(dtype, device),
    ],
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
    samples=_from(lambda x, y: ([x[0], x[0].mT], [y[0].mT, y[0]])),
    since="2.13",
)
