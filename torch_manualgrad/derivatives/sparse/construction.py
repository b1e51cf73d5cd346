"""Constructors of sparse tensors: from values with their indices, and from the nonzero entries of a dense tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import blocksize, formula, rule

from .entries import (
    OF_COMPRESSED,
    OF_SPARSE_RESULTS,
    compressed_entries,
    entries_at,
    no_tangent,
    with_values,
)


@formula
def sparse_coo_tensor_values_backward(grad: Tensor, indices: Tensor) -> Tensor:
    """Cotangent of the values, given that of the sparse tensor that stores them: its entries at the indices.

    Args:
        grad: cotangent, sparse (COO) or dense.
        indices: (d, n).

    Returns:
        (n, *).

    References:
        ATen derivatives.yaml, _sparse_coo_tensor_with_dims_and_tensors, which cannot be differentiated again.
    """
    return entries_at(grad, tuple(indices.unbind(0)), indices.shape[1])


def _values_fit(grad: Tensor, self: Tensor) -> str:
    """An error message if the arguments do not fit, else "". PyTorch does not check them."""
    if self.layout is torch.strided:
        return "self: expected a sparse tensor, got a dense one"
    sizes = list((self._values() if self.layout is torch.sparse_coo else self.values()).shape)
    return (
        "" if list(grad.shape) == sizes else f"grad: expected {sizes}, the shape of the values, got {list(grad.shape)}"
    )


@formula(requires=_values_fit)
def values_backward(grad: Tensor, self: Tensor) -> Tensor:
    """Cotangent of a sparse tensor, given that of its values: a sparse tensor with these values, and the same indices.

    Args:
        grad: cotangent of the values, their shape.
        self: sparse (COO, coalesced), or compressed.

    Returns:
        The shape, layout and indices of ``self``.
    """
    if self.layout is torch.sparse_coo:
        return with_values(self, grad)
    rows = self.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (self.crow_indices(), self.col_indices()) if rows else (self.ccol_indices(), self.row_indices())
    return torch.sparse_compressed_tensor(*indices, grad, self.shape, layout=self.layout, device=self.device)


@formula
def to_sparse_backward(grad: Tensor, self_layout: torch.layout, self_blocksize: Sequence[int] | None) -> Tensor:
    """Cotangent of a tensor, given that of the tensor in another layout: converted to the tensor's own layout.

    Args:
        grad: cotangent, dense or sparse.
        self_layout: the layout of the tensor.
        self_blocksize: the size of its blocks, if it has any; else None.

    Returns:
        The shape of ``grad``.

    References:
        ATen to_sparse_backward.
    """
    if grad.layout is self_layout and blocksize(grad) == self_blocksize:
        return grad
    if self_layout is torch.strided:
        return grad.to_dense(masked_grad=False)
    if blocksize(grad) is not None:  # PyTorch does not convert blocks to compressed rows or columns
        grad = grad.to_sparse()
    return grad.to_sparse(layout=self_layout, blocksize=self_blocksize)


def _compressed_vjp(
    grad: Tensor,
    compressed_indices: Tensor,
    plain_indices: Tensor,
    values_sizes: Any,
    result_layout: torch.layout,
) -> Tensor:
    at = compressed_entries(compressed_indices, plain_indices, values_sizes, result_layout)
    return entries_at(grad, at)


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    vjp={"indices": lambda: None, "values": sparse_coo_tensor_values_backward},
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_SPARSE_RESULTS,
    improves="values",
    source="ATen derivatives.yaml; differentiable again",
)
rule(
    "aten::sparse_compressed_tensor.comp_plain_value_size",
    vjp={"compressed_indices": lambda: None, "plain_indices": lambda: None, "values": _compressed_vjp},
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_COMPRESSED
    | OF_SPARSE_RESULTS
    | {"fake": ("the operator's fake kernel asks for the device of real tensors", "2.15")},
    improves="missing",
    source="ATen derivatives.yaml; for complex values, and differentiable again",
)
rule(
    "aten::_sparse_compressed_tensor_unsafe",
    vjp={"compressed_indices": lambda: None, "plain_indices": lambda: None, "values": _compressed_vjp},
    jvp={"result": no_tangent},
    sparse=True,
    drops_graph=True,
    gaps=OF_COMPRESSED | OF_SPARSE_RESULTS,
    improves="values",
    source="ATen derivatives.yaml, sparse_compressed_tensor; the derivative of values calls it, and is not differentiable",
)

for _layout in ("", ".sparse_dim", "_csr", "_csc", "_bsr", "_bsc"):
    _is_compressed = _layout.startswith("_")
    rule(
        f"aten::_to_sparse{_layout}",
        vjp={"self": to_sparse_backward},
        jvp={"result": no_tangent},
        kind="linear",
        sparse=True,
        gaps=OF_COMPRESSED | OF_SPARSE_RESULTS if _is_compressed else OF_SPARSE_RESULTS,
        improves="missing",
        source="ATen to_sparse_backward; for complex numbers new",
    )
