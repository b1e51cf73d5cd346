"""Products with a sparse matrix: _sparse_addmm, sparse_sampled_addmm, _sparse_mm_reduce_impl.

The cotangent of the sparse matrix is that of its entries: each is the product of two dense rows. A tangent of a dense
factor is supported if the result is dense.

Args:
    mat1: $A$, (m, k).
    mat2: $B$, (k, n).
    self, self_p: $A$, (m, k), CSR, real.
    other, other_p: $B$, (k, n).
    reduce: "sum", "mean", "amax" or "amin".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import blocksize, formula, rule

from ..linalg.matmul import cotangent_of_added, scaled
from ..terms import sum_over_tangents
from .construction import to_sparse_backward
from .entries import (
    OF_COMPRESSED,
    OF_SPARSE_RESULTS,
    as_coo,
    entries,
    entries_at,
    no_tangent,
    product_of_entries,
    to_dense_at,
    with_values,
)
from .sums import sparse_sparse_matmul_backward


def _products_at(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of $x y^H$: $sum_k x[i, k] conj(y[j, k])$."""
    return (x.index_select(0, rows) * y.index_select(0, columns).conj()).sum(-1)


def _adjoint_product(A: Tensor, G: Tensor) -> Tensor:
    """$A^H G$ for a sparse $A$, without products of sparse tensors, which PyTorch may not differentiate again."""
    A = as_coo(A)
    rows, columns = entries(A)
    return product_of_entries(A.values().conj(), columns, rows, G, A.shape[1])


# -- _sparse_addmm ----------------------------------------------------------------------------------------------------


@formula
def mm_mat1_sparse_backward(grad: Tensor, mat1: Tensor, mat2: Tensor, alpha: Number = 1) -> Tensor:
    """Cotangent of a sparse $A$, given that of $alpha A B$: $conj(alpha) G B^H$ at the entries of $A$.

    Args:
        grad: $G$, (m, n), dense.
        mat1: $A$, (m, k), sparse.
        mat2: $B$, (k, n), dense or sparse.
        alpha: a Python number, real or complex.

    Returns:
        (m, k), with the entries of $A$.

    References:
        ATen mm_mat1_sparse_backward, which has no conjugate of alpha, and takes no CSC.
    """
    A = as_coo(mat1)
    if mat2.layout is not torch.strided:
        found = sparse_sparse_matmul_backward(grad, A, as_coo(mat2), 0)
        return to_sparse_backward(scaled(found, alpha.conjugate()), mat1.layout, blocksize(mat1))
    return with_values(A, scaled(_products_at(grad, mat2, *entries(A)), alpha.conjugate()), mat1.layout)


def _mat2_vjp(
    grad: Tensor, mat1: Tensor, mat2_layout: torch.layout, mat2_blocksize: tuple[int, int] | None, alpha: Number
) -> Tensor:
    if mat2_layout is torch.strided:
        return scaled(_adjoint_product(mat1, grad), alpha.conjugate())
    found = torch.sparse.mm(as_coo(mat1).conj().t(), grad if grad.layout is torch.sparse_coo else grad.to_sparse())
    return to_sparse_backward(scaled(found, alpha.conjugate()), mat2_layout, mat2_blocksize)


# -- sparse_sampled_addmm ---------------------------------------------------------------------------------------------


@formula
def sparse_sampled_addmm_backward(
    grad: Tensor,
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    alpha: Number,
    beta: Number,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $S$, $A$ and $B$, given that of $alpha A B + beta S$ at the entries of $S$.

    With $G$ the cotangent at these entries: $conj(beta) G$, $conj(alpha) G B^H$, $conj(alpha) A^H G$.

    Args:
        grad: cotangent, (m, n), sparse or dense.
        self: $S$, (m, n), sparse (CSR).
        alpha, beta: Python numbers.
        grad_input_mask: which of the three are wanted. The first is empty if it is not.

    Returns:
        (m, n), with the entries of $S$; (m, k); (k, n).
    """
    S = as_coo(self)
    rows, columns = entries(S)
    G = entries_at(grad, (rows, columns))
    return (
        with_values(S, scaled(G, beta.conjugate()), self.layout) if grad_input_mask[0] else G.new_zeros(0),
        scaled(product_of_entries(G, rows, columns, mat2.mH, mat1.shape[0]), alpha.conjugate()),
        scaled(product_of_entries(G, columns, rows, mat1.conj(), mat2.shape[1]).mT, alpha.conjugate()),
    )


# -- _sparse_mm_reduce_impl -------------------------------------------------------------------------------------------
#
# A mean, maximum or minimum instead of the sum of products. For a mean the entries of a row are divided by their
# number. A maximum is the product of one entry and its row of the dense matrix, and has the derivative of that
# product. Of several that are equal, the first counts.


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

    Note:
        Where not differentiable: where products are equal. The first of them gets the whole cotangent.

    References:
        ATen _sparse_mm_reduce_impl_backward, which cannot be differentiated.
    """
    A = as_coo(self)
    rows, columns = entries(A)
    values = A.values()
    if reduce in ("sum", "mean"):
        weights = _weights(A, rows, reduce)
        of_other = product_of_entries(values * weights, columns, rows, grad, A.shape[1])
        of_values = _products_at(grad, other, rows, columns) * weights if output_mask[0] else None
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

    Note:
        Where not differentiable: where products are equal. The first of them gets the whole cotangent.

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


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::_sparse_addmm",
    vjp={
        "self": cotangent_of_added,
        "mat1": mm_mat1_sparse_backward,
        "mat2": _mat2_vjp,
    },
    jvp={
        "result": sum_over_tangents(
            lambda self_t, beta: scaled(self_t, beta),
            lambda mat2_t, mat1_p, alpha: scaled(torch.sparse.mm(mat1_p, mat2_t), alpha),
            then=lambda tangent, result: tangent.expand(result.shape),
        )
    },
    sparse=True,
    improves=("missing", "values"),
    source="ATen mm_mat1_sparse_backward; its jvp is new",
)
rule(
    "aten::sparse_sampled_addmm",
    vjp={("self", "mat1", "mat2"): sparse_sampled_addmm_backward.bind(grad_input_mask="output_mask")},
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_COMPRESSED | OF_SPARSE_RESULTS,
    improves="missing",
    source="ATen sparse_sampled_addmm_backward",
)
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
