"""Products with a sparse matrix: _sparse_addmm, sparse_sampled_addmm. See `reduced` for other reductions than the sum.

The cotangent of the sparse matrix is that of its entries: each is the product of two dense rows. A tangent of a dense
factor works where the result is dense.

Args:
    mat1: $A$, (m, k).
    mat2: $B$, (k, n).
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
    with_values,
)
from .sums import sparse_sparse_matmul_backward

__all__ = ["adjoint_product", "products_at"]


def products_at(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of $x y^H$: $sum_k x[i, k] conj(y[j, k])$."""
    return (x.index_select(0, rows) * y.index_select(0, columns).conj()).sum(-1)


def adjoint_product(A: Tensor, G: Tensor) -> Tensor:
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
    return with_values(A, scaled(products_at(grad, mat2, *entries(A)), alpha.conjugate()), mat1.layout)


def _mat2_vjp(
    grad: Tensor, mat1: Tensor, mat2_layout: torch.layout, mat2_blocksize: tuple[int, int] | None, alpha: Number
) -> Tensor:
    if mat2_layout is torch.strided:
        return scaled(adjoint_product(mat1, grad), alpha.conjugate())
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
