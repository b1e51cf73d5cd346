"""embedding_bag: sums, means or maxima of rows of a table over bags, and its two backwards.

Let $W$ be the rows. Entry $i$ has a bag $b$, an index $n_i$ and a coefficient $c_i$: its per-sample weight, or one over the
number of entries for a mean, or 0 for padding. The result is $y_b$, the sum of $c_i W[n_i]$ over $i$ in $b$. Gradients are
linear in the cotangent: the sum of $c_i G_b$ for each row, and $<G_b, W[n_i]>$ for each weight. Each of the three is the
derivative of another.

Args:
    indices: (k,), integers.
    offset2bag: (k,), the bag of each entry.
    maximum_indices: (bags, d), which row has the maximum, for mode 2 only.
    scale_grad_by_freq: whether entries are divided by how often their row is read, as its gradient is by convention.
    mode: 0 for sums, 1 for means, 2 for maxima.
    per_sample_weights: (k,), for sums, or None.
    padding_idx: entries with this index are ignored; negative for none.
    grad: $G$, (bags, d), real.

Note:
    Where not differentiable: where a maximum is attained twice. One of the rows gets the whole derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, bind, bound_to, formula, parameters, rule

from ..terms import tangent_of_product

__all__ = ["embedding_bag_adjoint", "embedding_bag_linear", "embedding_bag_weights"]

SUM, MEAN, MAX = range(3)


def _bag_of(indices: Tensor, offsets: Tensor) -> Tensor:
    """The bag of each entry; one more offset at the end changes nothing."""
    starts = indices.new_zeros(indices.shape[0] + 1, dtype=torch.int64)
    starts = starts.index_add(0, offsets, torch.ones_like(offsets, dtype=torch.int64))
    return starts.narrow(0, 0, indices.shape[0]).cumsum(0) - 1


def _coefficients(
    like: Tensor, indices: Tensor, bag: Tensor, mode: int, weights: Tensor | None, padding_idx: int, bags: Any
) -> Tensor:
    """$c$, one for each entry."""
    counts = indices != padding_idx
    if mode == MEAN:
        sizes = counts.new_zeros(bags, dtype=torch.int64).index_add(0, bag, counts.long()).clamp(min=1)
        return counts.to(like.dtype) / sizes.index_select(0, bag)
    return counts.to(like.dtype) if weights is None else weights.masked_fill(~counts, 0)


def _frequencies(indices: Tensor, n: Any) -> Tensor:
    """For each entry, how often its row is read."""
    found = indices.new_zeros(n, dtype=torch.int64).index_add(0, indices, torch.ones_like(indices, dtype=torch.int64))
    return found.index_select(0, indices)


def _full(indices: Tensor, bag: Tensor, padding_idx: int, bags: Any) -> Tensor:
    """Whether a bag has an entry that is not padding, (bags, 1)."""
    counts = (indices != padding_idx).long()
    return (counts.new_zeros(bags).index_add(0, bag, counts) > 0)[:, None]


@formula
def embedding_bag_linear(
    weight: Tensor,
    indices: Tensor,
    offset2bag: Tensor,
    maximum_indices: Tensor,
    bags: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int,
) -> Tensor:
    """embedding_bag as a function of the table: the sums of $c_i W[n_i]$ in each bag, or the rows of the maxima.

    Args:
        weight: $W$, (n, d), real; or a tangent of it, or a cotangent of its gradient.
        bags: the number of bags.

    Returns:
        (bags, d).

    References:
        The transpose of ATen _embedding_bag_dense_backward.
    """
    if mode == MAX:
        full = _full(indices, offset2bag, padding_idx, bags)
        return torch.where(full, weight.gather(0, maximum_indices.clamp(min=0)), 0)
    c = _coefficients(weight, indices, offset2bag, mode, per_sample_weights, padding_idx, bags)
    if scale_grad_by_freq:
        c = c / _frequencies(indices, weight.shape[0])
    rows = weight.index_select(0, indices).masked_fill((indices == padding_idx)[:, None], 0)
    return weight.new_zeros(bags, weight.shape[1]).index_add(0, offset2bag, rows * c[:, None])


@formula
def embedding_bag_adjoint(
    grad: Tensor,
    indices: Tensor,
    offset2bag: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int,
) -> Tensor:
    """Cotangent of the table, given that of embedding_bag: the sum of $c_i G_b$ over the entries of each row.

    Args:
        num_weights: $n$, the number of rows of the table.

    Returns:
        (n, d).

    References:
        ATen _embedding_bag_dense_backward, which has no derivative.
    """
    zeros = grad.new_zeros(num_weights, grad.shape[1])
    if mode == MAX:
        full = _full(indices, offset2bag, padding_idx, grad.shape[0])
        return zeros.scatter_add(0, maximum_indices.clamp(min=0), torch.where(full, grad, 0))
    c = _coefficients(grad, indices, offset2bag, mode, per_sample_weights, padding_idx, grad.shape[0])
    if scale_grad_by_freq:
        c = c / _frequencies(indices, num_weights)
    return zeros.index_add(0, indices, grad.index_select(0, offset2bag) * c[:, None])


@formula
def embedding_bag_weights(
    grad: Tensor, weight: Tensor, indices: Tensor, offset2bag: Tensor, scale_grad_by_freq: bool, padding_idx: int
) -> Tensor:
    """Cotangent of the per-sample weights, given that of embedding_bag: $<G_b, W[n_i]>$ for each entry.

    Args:
        weight: $W$, (n, d).

    Returns:
        (k,).

    References:
        ATen _embedding_bag_per_sample_weights_backward, which has no derivative.
    """
    found = (grad.index_select(0, offset2bag) * weight.index_select(0, indices)).sum(1)
    if scale_grad_by_freq:
        found = found / _frequencies(indices, weight.shape[0])
    return found.masked_fill(indices == padding_idx, 0)


def _weight_vjp(
    grad_result0: Tensor,
    indices: Tensor,
    offsets: Tensor,
    result1: Tensor,
    result2: Tensor,
    result3: Tensor,
    weight_sizes: Any,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int,
) -> Tensor:
    more = (weight_sizes[0], scale_grad_by_freq, mode)
    if sparse:
        saved = (indices, offsets, result1, result2, result3)
        return aten._embedding_bag_backward(grad_result0, *saved, *more, True, per_sample_weights, padding_idx)
    bag = _bag_of(indices, offsets)
    return embedding_bag_adjoint(grad_result0, indices, bag, result3, *more, per_sample_weights, padding_idx)


def _term(
    weight: Tensor,
    per_sample_weights: Tensor | None,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    padding_idx: int,
    result0: Tensor,
    result3: Tensor,
) -> Tensor:
    """embedding_bag, which is linear in the table and in the per-sample weights."""
    rest = (result3, result0.shape[0], False, mode, per_sample_weights, padding_idx)
    return embedding_bag_linear(weight, indices, _bag_of(indices, offsets), *rest)


def _of_backward(
    of_result: Tensor,
    grad: Tensor,
    indices: Tensor,
    bag: Tensor,
    maximum_indices: Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int,
) -> tuple[Tensor, Tensor | None]:
    """Cotangents of $G$ and of the per-sample weights, given that of the result of the backward."""
    rest = (grad.shape[0], scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    of_grad = embedding_bag_linear(of_result, indices, bag, maximum_indices, *rest)
    if per_sample_weights is None:
        return of_grad, None
    return of_grad, embedding_bag_weights(grad, of_result, indices, bag, scale_grad_by_freq, padding_idx)


def _of_backward_by_offsets(
    of_result: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    return _of_backward(of_result, grad, indices, _bag_of(indices, offsets), *rest)


# -- the rules --------------------------------------------------------------------------------------------------------

aten = torch.ops.aten

_BACKWARD = ["grad_result", "grad", "indices", "offsets", *parameters(_of_backward)[4:]]


def _defer(weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool, *_: Any) -> bool:
    return not scale_grad_by_freq


for _name in ("_embedding_bag", "_embedding_bag_forward_only"):
    rule(
        f"aten::{_name}",
        vjp={
            "weight": _weight_vjp,
            "per_sample_weights": lambda grad_result0, weight, indices, offsets, padding_idx: embedding_bag_weights(
                grad_result0, weight, indices, _bag_of(indices, offsets), False, padding_idx
            ),
        },
        jvp={"result0": tangent_of_product(_term, "weight", "per_sample_weights", others=parameters(_term)[2:])},
        not_differentiable=("result1", "result2", "result3"),
        defer_to_stock=ByMetadata(_defer) if _name == "_embedding_bag" else None,
        improves={"values": "2.15", "missing": None} if _name == "_embedding_bag" else "missing",
        source="ATen derivatives.yaml; the derivatives of the backward are new",
    )
rule(
    "aten::_embedding_bag_backward",
    vjp={("grad", "per_sample_weights"): bound_to(_of_backward_by_offsets, _BACKWARD)},
    improves="missing",
    source="the transpose of ATen _embedding_bag_backward",
)
rule(
    "aten::_embedding_bag_dense_backward",
    vjp={("grad", "per_sample_weights"): bind(_of_backward, of_result="grad_result", bag="offset2bag")},
    improves="missing",
    source="the transpose of ATen _embedding_bag_dense_backward",
)
rule(
    "aten::_embedding_bag_per_sample_weights_backward",
    vjp={
        "grad": lambda grad_result, grad_sizes, weight, indices, offsets, padding_idx: embedding_bag_linear(
            weight, indices, _bag_of(indices, offsets), indices, grad_sizes[0], False, SUM, grad_result, padding_idx
        ),
        "weight": lambda grad_result, grad, weight_sizes, indices, offsets, padding_idx: embedding_bag_adjoint(
            grad, indices, _bag_of(indices, offsets), indices, weight_sizes[0], False, SUM, grad_result, padding_idx
        ),
    },
    improves="missing",
    source="ATen derivatives.yaml, _embedding_bag; the operator is bilinear",
)
