"""linalg_cross: the product of vectors in three dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import rule

from .common import of_dtype, samples

__all__ = ["linalg_cross_backward", "linalg_cross_jvp"]


@formula
def linalg_cross_backward(grad: Tensor, self: Tensor, other: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cotangents of x and y, given that of x * y, the cross product: conj(y) * g and g * conj(x).

    Args:
        grad: g, the shape of x and y broadcast.
        self: x.
        other: y, which broadcasts with x.
        dim: along which the vectors lie, of size 3.

    Returns:
        The shapes of x and y.

    Note:
        Where not differentiable: nowhere; it is bilinear.

    References:
        derivatives.yaml, linalg_cross.
    """
    of_self, of_other = torch.linalg.cross(other.conj(), grad, dim=dim), torch.linalg.cross(grad, self.conj(), dim=dim)
    return (
        of_dtype(of_self.sum_to_size(self.shape), self.dtype),
        of_dtype(of_other.sum_to_size(other.shape), other.dtype),
    )


@formula
def linalg_cross_jvp(
    self_p: Tensor, self_t: Tensor | None, other_p: Tensor, other_t: Tensor | None, dim: int
) -> Tensor:
    """Tangent of the cross product: dx * y + x * dy.

    Args:
        self_p, other_p, dim: see `linalg_cross_backward`.
        self_t, other_t: tangents; None for zero.

    Returns:
        The shape of the result.

    Note:
        Where not differentiable: nowhere; it is bilinear.

    References:
        derivatives.yaml, linalg_cross.
    """
    terms = [
        torch.linalg.cross(x, y, dim=dim)
        for x, y in ((self_t, other_p), (self_p, other_t))
        if x is not None and y is not None
    ]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


rule(
    "aten::linalg_cross",
    vjp={("self", "other"): linalg_cross_backward},
    jvp={"result": linalg_cross_jvp},
    source="ATen derivatives.yaml",
    samples=samples(
        lambda draw, index: (draw(2, 3), draw(2, 3)),
        lambda draw, index: (draw(3, 2), draw(3, 1), {"dim": -2}),
    ),
)
