"""sparse_mask: the entries of a tensor that a sparse tensor stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .entries import (
    OF_SPARSE_RESULTS,
    as_coo,
    entries,
    entries_at,
    no_tangent,
    to_dense_at,
    with_values,
)


def _sizes_fit(mask: Tensor, self_sizes: Sequence[int], sparse: bool) -> str:
    """An error message if the sizes do not fit, else "". The gradient has a place for each entry of the mask."""
    if sparse or list(mask.shape) == list(self_sizes):
        return ""
    return f"self_sizes: expected {list(mask.shape)}, the shape of mask, got {list(self_sizes)}"


@formula(requires=_sizes_fit)
def sparse_mask_backward(grad: Tensor, mask: Tensor, self_sizes: Sequence[int], sparse: bool) -> Tensor:
    """Cotangent of $x$, given that of its entries in a mask: the cotangent there, zero elsewhere.

    Args:
        grad: cotangent, sparse or dense.
        mask: sparse.
        self_sizes: of $x$.
        sparse: whether $x$ is sparse.

    Returns:
        The shape of $x$, with the entries of ``mask`` if $x$ is sparse, else dense.

    References:
        ATen sparse_mask_backward, which cannot be differentiated again, and is for COO only.
    """
    layout = mask.layout
    if sparse:
        mask = as_coo(mask)
    at = entries(mask)
    found = entries_at(grad, at, mask._nnz())
    return with_values(mask, found, layout) if sparse else to_dense_at(found, at, self_sizes)


rule(
    "aten::sparse_mask",
    vjp={
        "self": lambda grad, mask, self_sizes, self_layout: sparse_mask_backward(
            grad, mask, self_sizes, self_layout is not torch.strided
        ),
        "mask": lambda grad: None,
    },
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_SPARSE_RESULTS,
    improves="missing",
    source="ATen sparse_mask_backward",
)
