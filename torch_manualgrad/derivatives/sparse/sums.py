"""_sparse_sum.dim, _sparse_softmax, _sparse_log_softmax, _sparse_sparse_matmul: functions of sparse tensors (COO).

Entries that are not stored are left out of a softmax, as if they were $-inf$.

Args:
    grad: $g$, sparse or dense.
    output: $y$, sparse (COO).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .entries import OF_SPARSE_RESULTS, as_coo, entries, entries_at, no_tangent, with_values

# -- sums -------------------------------------------------------------------------------------------------------------


@formula
def _sparse_sum_backward(grad: Tensor, self: Tensor, dim: Sequence[int]) -> Tensor:
    """Cotangent of a sparse tensor, given that of its sum over some dims: the same for all terms of a sum.

    Args:
        grad: cotangent, dense if all sparse dims are summed over, else sparse or dense.
        self: (*), sparse (COO).
        dim: the dims that are summed over.

    Returns:
        (*), with the entries of ``self``.

    References:
        ATen _sparse_sum_backward, which cannot be differentiated.
    """
    x = as_coo(self)
    summed = {d % x.dim() for d in dim}
    indices = tuple(i for d, i in enumerate(entries(x)) if d not in summed)
    values = entries_at(grad, indices) if indices else grad.unsqueeze(0)
    for d in range(x.sparse_dim(), x.dim()):
        if d in summed:
            values = values.unsqueeze(d - x.sparse_dim() + 1)
    return with_values(x, values.expand(x._values().shape))


# -- softmax ----------------------------------------------------------------------------------------------------------


def _sums_over(x: Tensor, values: Tensor, dim: int) -> Tensor:
    """For each entry, the sum of the values of all entries that differ from it in the index ``dim`` only."""
    if dim >= x.sparse_dim():
        return values.sum(dim - x.sparse_dim() + 1, keepdim=True)
    others = torch.stack([i for d, i in enumerate(entries(x)) if d != dim] or [torch.zeros_like(entries(x)[0])])
    lines, line = others.unique(dim=1, return_inverse=True)
    return values.new_zeros(lines.shape[1], *values.shape[1:]).index_add(0, line, values)[line]


@formula
def _sparse_softmax_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given $g$, that of $y = softmax(x)$: $y (g - sum y g)$.

    Args:
        dim: the dim over which $y$ sums to 1.

    Returns:
        The shape and the entries of $y$.

    References:
        ATen _sparse_softmax_backward_data, which cannot be differentiated.
    """
    x = as_coo(output)
    y, g = x.values(), entries_at(grad, entries(x), x._nnz())
    return with_values(x, y * (g - _sums_over(x, y * g, dim % x.dim())))


@formula
def _sparse_log_softmax_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given $g$, that of $y = log_softmax(x)$: $g - exp(y) sum g$.

    Args:
        dim: the dim over which $exp(y)$ sums to 1.

    Returns:
        The shape and the entries of $y$.

    References:
        ATen _sparse_log_softmax_backward_data, which cannot be differentiated.
    """
    x = as_coo(output)
    y, g = x.values(), entries_at(grad, entries(x), x._nnz())
    return with_values(x, g - y.exp() * _sums_over(x, g, dim % x.dim()))


# -- products ---------------------------------------------------------------------------------------------------------


@formula
def sparse_sparse_matmul_backward(grad: Tensor, a: Tensor, b: Tensor, grad_order: int) -> Tensor:
    """Cotangent of $A$ (``grad_order`` 0) or $B$ (1), given $G$, that of $A B$: $G B^H$ or $A^H G$ at its entries.

    Args:
        grad: $G$, (m, n), sparse or dense.
        a: $A$, (m, k), sparse (COO).
        b: $B$, (k, n), sparse (COO).
        grad_order: 0 for $A$, 1 for $B$.

    Returns:
        The shape and the entries of $A$ or of $B$.

    References:
        ATen sparse_sparse_matmul_backward, which cannot be differentiated again.
    """
    G = grad if grad.layout is torch.sparse_coo else grad.to_sparse()
    found = torch.sparse.mm(G, b.conj().t()) if grad_order == 0 else torch.sparse.mm(a.conj().t(), G)
    x = as_coo(b if grad_order else a)
    return with_values(x, entries_at(found, entries(x), x._nnz()))


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::_sparse_sum.dim",
    vjp={"self": _sparse_sum_backward},
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_SPARSE_RESULTS,
    improves="missing",
    source="ATen _sparse_sum_backward; differentiable, and for complex numbers",
)
for _name, _backward in (("softmax", _sparse_softmax_backward), ("log_softmax", _sparse_log_softmax_backward)):
    rule(
        f"aten::_sparse_{_name}",
        vjp={"self": _backward.bind(output="result")},
        jvp={"result": no_tangent},
        sparse=True,
        gaps=OF_SPARSE_RESULTS,
        improves="missing",
        source=f"ATen _sparse_{_name}_backward_data; differentiable",
    )
rule(
    "aten::_sparse_sparse_matmul",
    vjp={
        "self": sparse_sparse_matmul_backward.bind(a="self", b="other", grad_order=0),
        "other": sparse_sparse_matmul_backward.bind(a="self", b="other", grad_order=1),
    },
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_SPARSE_RESULTS,
    improves="missing",
    source="ATen sparse_sparse_matmul_backward",
)
