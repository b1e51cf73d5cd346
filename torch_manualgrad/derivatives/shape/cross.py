"""linalg_cross: the product of vectors in three dimensions.

Args:
    dim: the dim of the vectors, of size 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .common import of_dtype

__all__ = ["linalg_cross_backward", "linalg_cross_jvp"]


@formula
def linalg_cross_backward(grad: Tensor, other: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of the cross product of $x$ and $y$: $conj(y)$ times $g$; for $y$, $g$ times $conj(x)$.

    Args:
        grad: $g$, the shape of $x$ and $y$ broadcast.
        other: $y$, which broadcasts with $x$.

    Returns:
        The shape of ``grad``, not yet summed to that of $x$.

    References:
        derivatives.yaml, linalg_cross.
    """
    return torch.linalg.cross(other.conj(), grad, dim=dim)


@formula
def linalg_cross_jvp(
    self_p: Tensor, self_t: Tensor | None, other_p: Tensor, other_t: Tensor | None, dim: int
) -> Tensor:
    """Tangent of the cross product: $dx$ times $y$, plus $x$ times $dy$.

    Args:
        self_p, other_p: $x$ and $y$, which broadcast.
        self_t, other_t: tangents; None for zero.

    Returns:
        The shape of the result.

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
    vjp={
        "self": lambda grad, other, dim, self_sizes, self_dtype: of_dtype(
            linalg_cross_backward(grad, other, dim).sum_to_size(self_sizes), self_dtype
        ),
        "other": lambda grad, self, dim, other_sizes, other_dtype: of_dtype(
            -linalg_cross_backward(grad, self, dim).sum_to_size(other_sizes), other_dtype
        ),
    },
    jvp={"result": linalg_cross_jvp},
    source="ATen derivatives.yaml",
)
