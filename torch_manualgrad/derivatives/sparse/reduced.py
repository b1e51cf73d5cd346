"""_sparse_mm_reduce_impl: products of a sparse and a dense matrix, with a mean, maximum or minimum for the sum.

For a mean the entries of row $i$ are divided by their number. A maximum is the product of one entry and its row of the
dense matrix, and has the derivative of that product. Of several that are equal, the first counts.

Args:
    self, self_p: $A$, (m, k), CSR, real.
    other, other_p: $B$, (k, n).
    reduce: "sum", "mean", "amax" or "amin".

Note:
    Where not differentiable: where products are equal. The first of them has all of the cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .entries import OF_COMPRESSED, as_coo, entries, product_of_entries, to_dense_at, with_values
from .products import products_at


def _weights(self: Tensor, rows: Tensor, reduce: str) -> Tensor:
    """The factor of each entry: 1, or $1 / n$ for the mean of $n$."""
    count = rows.bincount(minlength=self.shape[0])[rows] if reduce == "mean" else torch.ones_like(rows)
    return 1 / count.to(self.dtype)


def _csr(A: Tensor, values: Tensor | None) -> Tensor:
    """The gradient of $A$ with these values; empty if they are None."""
    return torch.zeros(0, device=A.device) if values is None else with_values(A, values, torch.sparse_csr)


def _chosen(A: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The entry that each result comes from, and whether there is one."""
    rows, columns = entries(A)
    with torch.no_grad():
        products = A.values().detach().unsqueeze(-1) * other.detach()[columns]
        at = rows.unsqueeze(-1).expand_as(products)
        size = (A.shape[0], other.shape[1])
        result = products.new_zeros(size).scatter_reduce(0, at, products, reduce, include_self=False)
        hit = (products == result[rows]) | products.isnan()
        number = torch.arange(len(rows), device=rows.device).unsqueeze(-1)
        none = torch.full(size, len(rows), device=rows.device)
        found = none.scatter_reduce(0, at, torch.where(hit, number, len(rows)), "amin")
    return found.clamp(max=max(len(rows) - 1, 0)), found < len(rows)


@formula
def sparse_mm_reduce_backward(
    self: Tensor, grad: Tensor, other: Tensor, reduce: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Cotangents of a sparse $A$ and of $B$, given that of the reduced products.

    Args:
        grad: cotangent, (m, n).
        output_mask: which of the two are wanted. The first is empty if it is not.

    Returns:
        (m, k), with the entries of $A$; (k, n).

    References:
        ATen _sparse_mm_reduce_impl_backward, which cannot be differentiated.
    """
    A = as_coo(self)
    rows, columns = entries(A)
    values = A.values()
    if reduce in ("sum", "mean"):
        weights = _weights(A, rows, reduce)
        of_other = product_of_entries(values * weights, columns, rows, grad, A.shape[1])
        of_values = products_at(grad, other, rows, columns) * weights if output_mask[0] else None
        return _csr(A, of_values), of_other
    if not len(rows):
        return _csr(A, torch.zeros_like(values) if output_mask[0] else None), torch.zeros_like(other)
    chosen, valid = _chosen(A, other, reduce)
    kept = torch.where(valid, grad, 0)
    at = (columns[chosen], torch.arange(grad.shape[1], device=grad.device).expand_as(chosen))
    of_values = None
    if output_mask[0]:
        of_values = to_dense_at(kept * other[at], (chosen,), values.shape)
    return _csr(A, of_values), to_dense_at(kept * values[chosen], at, other.shape)


@formula
def sparse_mm_reduce_jvp(self_p: Tensor, other_p: Tensor, other_t: Tensor, reduce: str) -> Tensor:
    """Tangent of the reduced products $A B$, for a tangent of $B$.

    Args:
        other_t: tangent of $B$, (k, n).

    Returns:
        (m, n).

    References:
        The transpose of `sparse_mm_reduce_backward`.
    """
    A = as_coo(self_p)
    rows, columns = entries(A)
    values = A.values()
    if reduce in ("sum", "mean"):
        weighted = values * _weights(A, rows, reduce)
        return product_of_entries(weighted, rows, columns, other_t, A.shape[0])
    if not len(rows):
        return other_t.new_zeros(A.shape[0], other_t.shape[1])
    chosen, valid = _chosen(A, other_p, reduce)
    at = (columns[chosen], torch.arange(other_t.shape[1], device=rows.device).expand_as(chosen))
    return torch.where(valid, values[chosen] * other_t[at], 0)


rule(
    "aten::_sparse_mm_reduce_impl",
    vjp={("self", "other"): sparse_mm_reduce_backward.bind(grad="grad_result0")},
    jvp={"result0": sparse_mm_reduce_jvp},
    sparse=True,
    gaps=OF_COMPRESSED,
    not_differentiable="result1",
    improves="missing",
    source="ATen _sparse_mm_reduce_impl_backward; its derivatives are new",
)
