"""Scatter, gather, take and put: entries at the places that an index gives, along a dim or in the flattened tensor.

An index may be smaller than the tensors: entries that it does not reach get no gradient. Where several entries of scatter.src,
or of put without accumulation, go to one place, one of them remains (PyTorch does not specify which), and each gets the
cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, formula, linear_in, rule

from ..shape.common import in_corner

__all__ = ["scatter_src_backward", "take_backward"]


@formula
def scatter_src_backward(grad: Tensor, dim: int, index: Tensor, src_sizes: Sequence[int]) -> Tensor:
    """Cotangent of the scattered tensor: the cotangent at the places of the index, and zero where the index has none.

    Args:
        grad: cotangent of the result.
        dim: the dim along which entries go.
        index: integers; its sizes are at most those of ``src_sizes``.
        src_sizes: the sizes of the scattered tensor.

    Returns:
        Of shape ``src_sizes``.

    References:
        derivatives.yaml, scatter.src, which assumes that the index has the sizes of src.
    """
    return in_corner(grad.gather(dim, index), src_sizes)


@formula
def take_backward(grad: Tensor, self_sizes: Sequence[int], index: Tensor) -> Tensor:
    """Cotangent of $x$, given that of ``x.take(index)``: the sum of the cotangents of the copies of each entry.

    Args:
        grad: the shape of ``index``.
        self_sizes: of $x$.
        index: integers, negative ones count from the end.

    Returns:
        Of shape ``self_sizes``.
    """
    return grad.new_zeros(self_sizes).put(index, grad, accumulate=True)


def _gather_vjp(grad: Tensor, dim: int, index: Tensor, sparse_grad: bool, self_sizes: Sequence[int]) -> Tensor:
    if sparse_grad:
        return torch.ops.aten.gather_backward(grad, grad.new_zeros(()).expand(self_sizes), dim, index, True)
    return grad.new_zeros(self_sizes).scatter_add(dim, index, grad)


def _same_sizes(self: Tensor, dim: int, index: Tensor, src: Tensor) -> bool:
    return index.shape == src.shape


linear_in(
    "aten::scatter.src",
    {"self": lambda grad, dim, index: grad.scatter(dim, index, 0), "src": scatter_src_backward},
    improves="missing",
    defer_to_stock=ByMetadata(_same_sizes),
)
rule(
    "aten::scatter.value",
    vjp={"self": lambda grad, dim, index: grad.scatter(dim, index, 0)},
    jvp={"result": lambda self_t, dim, index: self_t.scatter(dim, index, 0)},
    kind="linear",
    source="ATen derivatives.yaml",
)
linear_in(
    "aten::scatter_add",
    {"self": lambda grad: grad, "src": scatter_src_backward},
    improves="missing",
    defer_to_stock=ByMetadata(_same_sizes),
)
linear_in("aten::gather", {"self": _gather_vjp})
linear_in("aten::take", {"self": take_backward})
linear_in(
    "aten::put",
    {
        "self": lambda grad, index, accumulate, source_sizes: (
            grad if accumulate else grad.put(index, grad.new_zeros(source_sizes))
        ),
        "source": lambda grad, index, source_sizes: grad.take(index).reshape(source_sizes),
    },
)
