"""The stored entries of sparse tensors: their indices, and the entries of other tensors at these indices.

A derivative with respect to the values of a sparse tensor is the cotangent at its entries. It is composed of
differentiable operators on dense tensors, and so has derivatives of every order in reverse mode. Forward mode ends at a
sparse result: PyTorch's dual tensors have storage, and a sparse tensor has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "OF_COMPRESSED",
    "OF_SPARSE_RESULTS",
    "as_coo",
    "compressed_entries",
    "entries",
    "entries_at",
    "no_tangent",
    "product_of_entries",
    "to_dense_at",
    "with_values",
]

# The modes and checks that cannot work, with the reason.
OF_SPARSE_RESULTS = {
    **dict.fromkeys(
        ("fwd", "fwd-rev", "fwd-fwd", "rev-fwd"), "the result is sparse, and PyTorch's dual tensors cannot be"
    ),
    **dict.fromkeys(("vmap", "vmap-grad"), "PyTorch's vmap is for dense tensors"),
}
OF_COMPRESSED = {
    **dict.fromkeys(
        ("rev/func", "fwd/func", "rev-rev/func", "fwd-rev/func", "fwd-fwd", "rev-fwd/func", "duality/func"),
        "torch.func wraps tensors that have strides, and compressed sparse ones have none",
    ),
    "vmap-grad": "PyTorch's vmap is for dense tensors",
}

_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)


def no_tangent(result: Tensor) -> Tensor:
    """The jvp of an operator whose result is sparse.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"a tangent of layout {result.layout}: PyTorch's dual tensors cannot be sparse")


def entries(x: Tensor) -> tuple[Tensor, ...]:
    """The indices of the stored entries of a sparse tensor, one tensor for each sparse dim.

    They broadcast to the shape of its values without the dense dims.
    """
    if x.layout is torch.sparse_coo:
        return tuple(x._indices().unbind(0))
    rows = x.layout in _ROWS
    compressed, plain = (x.crow_indices(), x.col_indices()) if rows else (x.ccol_indices(), x.row_indices())
    return compressed_entries(compressed, plain, x.values().shape, x.layout)


def compressed_entries(
    compressed: Tensor, plain: Tensor, sizes: Sequence[int], layout: torch.layout
) -> tuple[Tensor, ...]:
    """`entries` of a compressed sparse tensor, from its parts and the sizes of its values; batch dims come first."""
    lengths = compressed.diff(dim=-1)
    at = torch.arange(lengths.shape[-1], device=plain.device)
    outer = torch.repeat_interleave(
        at.expand_as(lengths).flatten(), lengths.flatten(), output_size=plain.numel()
    ).reshape(plain.shape)
    batch = [
        torch.arange(n, device=plain.device).reshape([-1] + [1] * (plain.dim() - d - 1))
        for d, n in enumerate(plain.shape[:-1])
    ]
    if layout in _BLOCKS:
        height, width = sizes[plain.dim() : plain.dim() + 2]
        first, second = (height, width) if layout in _ROWS else (width, height)
        within = [torch.arange(n, device=plain.device) for n in (first, second)]
        batch = [b[..., None, None] for b in batch]
        outer = outer[..., None, None] * first
        plain = plain[..., None, None] * second
        shapes = ([-1, 1], [1, -1]) if layout in _ROWS else ([1, -1], [-1, 1])
        outer, plain = outer + within[0].reshape(shapes[0]), plain + within[1].reshape(shapes[1])
    return (*batch, outer, plain) if layout in _ROWS else (*batch, plain, outer)


def as_coo(x: Tensor) -> Tensor:
    """A sparse tensor in the layout COO, with each entry stored once.

    ``values`` of a compressed tensor cannot be differentiated twice in PyTorch; those of COO can.
    """
    return (x if x.layout is torch.sparse_coo else x.to_sparse()).coalesce()


def _positions(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The row-major positions of the entries."""
    found: Any = 0
    for i, n in zip(indices, sizes):
        found = found * n + i
    return found


def entries_at(x: Tensor, indices: tuple[Tensor, ...], count: int = 1) -> Tensor:
    """The entries of a tensor, sparse or dense, at these indices; zero where nothing is stored.

    Args:
        x: (*); if it is sparse, ``indices`` are those of its sparse dims.
        indices: one tensor for each of the first dims.
        count: the number of entries if there are no sparse dims. Each entry is then the whole of $x$.

    Returns:
        The shape to which ``indices`` broadcast, followed by the dims of $x$ that they do not index.
    """
    if x.layout in _BLOCKS or x.layout is not torch.sparse_coo and len(indices) > 2:
        x = x.to_dense(masked_grad=False)
    if not indices:
        x = x if x.layout is torch.strided else x.to_dense(masked_grad=False)
        return x.expand(count, *x.shape)
    if x.layout is torch.strided:
        return x[indices]
    x = as_coo(x)
    stored, values = _positions(entries(x), x.shape), x.values()
    asked = _positions(torch.broadcast_tensors(*indices), x.shape)
    if not stored.numel():
        return values.new_zeros(*asked.shape, *values.shape[1:])
    place = torch.searchsorted(stored, asked).clamp(max=stored.numel() - 1)
    found, hit = values[place], stored[place] == asked
    return torch.where(hit.reshape(*hit.shape, *[1] * (found.dim() - hit.dim())), found, 0)


def to_dense_at(values: Tensor, indices: tuple[Tensor, ...], sizes: Sequence[int]) -> Tensor:
    """A dense tensor with these values at these indices, and zeros elsewhere. Values at the same index are added."""
    if not indices:
        return values.sum(0)
    # not index_put, which adds in an order that depends on the threads
    rest = math.prod(sizes[len(indices) :])
    at = _positions(indices, sizes).reshape(-1, 1) * rest + torch.arange(rest, device=values.device)
    return values.new_zeros(math.prod(sizes)).index_add(0, at.reshape(-1), values.reshape(-1)).reshape(sizes)


def product_of_entries(values: Tensor, rows: Tensor, columns: Tensor, dense: Tensor, height: int) -> Tensor:
    """The product of a sparse matrix, given by its entries and its height, and a dense matrix."""
    return dense.new_zeros(height, dense.shape[1]).index_add(
        0, rows, values.unsqueeze(-1) * dense.index_select(0, columns)
    )


def with_values(x: Tensor, values: Tensor, layout: torch.layout = torch.sparse_coo) -> Tensor:
    """A sparse tensor with the indices of another (COO), and these values."""
    found = torch.sparse_coo_tensor(x._indices(), values, x.shape, device=x.device, is_coalesced=x.is_coalesced())
    return found if layout is torch.sparse_coo else found.to_sparse(layout=layout)
