"""What makes sparse tensors of dense ones: of values with their indices, and of the entries that are not zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, blocksize, formula, operator, rule

from .entries import (
    OF_COMPRESSED,
    OF_SPARSE_RESULTS,
    compressed_entries,
    entries_at,
    made_dense,
    no_tangent,
    times_identity,
)


@formula
def sparse_coo_tensor_values_backward(grad: Tensor, indices: Tensor) -> Tensor:
    """Cotangent of the values, given that of the sparse tensor that they were stored in: what it has at the indices.

    Args:
        grad: cotangent, sparse (COO) or dense.
        indices: (d, n).

    Returns:
        (n, *).

    References:
        ATen derivatives.yaml, _sparse_coo_tensor_with_dims_and_tensors, which cannot be differentiated again.
    """
    return entries_at(grad, tuple(indices.unbind(0)), indices.shape[1])


def to_sparse_backward(grad: Tensor, self_layout: torch.layout, self_blocksize: Sequence[int] | None) -> Tensor:
    """Cotangent of a tensor, given that of the same in another layout (ATen to_sparse_backward).

    No formula: a schema has no type for a layout.
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


# -- samples ----------------------------------------------------------------------------------------------------------

_PATTERN = [[0, 1, 1], [1, 0, 1]]


def _drawn(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(device)


def _coo_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    kind = {"dtype": dtype, "layout": torch.sparse_coo, "device": torch.device(device)}
    at = torch.tensor([[0, 0, 1], [2, 1, 2]], device=device)
    yield Sample(2, 0, [2, 3], at, _drawn(3, dtype=dtype, device=device), **kind)
    twice = torch.tensor([[0, 1, 0], [1, 0, 1]], device=device)
    yield Sample(2, 0, [2, 2], twice, _drawn(3, dtype=dtype, device=device), **kind)


def _compressed_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    kind = {"dtype": dtype}
    rows, columns = torch.tensor([0, 2, 4], device=device), torch.tensor([1, 2, 0, 2], device=device)
    yield Sample(rows, columns, _drawn(4, dtype=dtype, device=device), [2, 3], layout=torch.sparse_csr, **kind)
    blocks = _drawn(1, 2, 2, dtype=dtype, device=device)
    ends, at = torch.tensor([0, 0, 1], device=device), torch.tensor([1], device=device)
    yield Sample(ends, at, blocks, [4, 4], layout=torch.sparse_bsr, **kind)


def _dense_samples(*args: Any, real_only: bool = False, **kwargs: Any) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if real_only and dtype.is_complex:
            return
        pattern = torch.tensor(_PATTERN, dtype=dtype, device=device)
        yield Sample(_drawn(2, 3, dtype=dtype, device=device) * pattern, *args, **kwargs)

    return samples


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    vjp={"indices": lambda: None, "values": sparse_coo_tensor_values_backward},
    jvp={"result": no_tangent},
    sparse=True,
    gaps=OF_SPARSE_RESULTS,
    improves="values",
    source="ATen derivatives.yaml; differentiable again",
    samples=_coo_samples,
    probe=times_identity(torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors),
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
    samples=_compressed_samples,
    probe=times_identity(torch.ops.aten.sparse_compressed_tensor),
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
    samples=_compressed_samples,
    probe=times_identity(torch.ops.aten._sparse_compressed_tensor_unsafe),
)

# operator -> other arguments; a matrix of blocks of columns has no products, and only real ones are made dense by PyTorch
_CONVERSIONS: dict[str, dict[str, Any]] = {
    "_to_sparse": {},
    "_to_sparse.sparse_dim": {"sparse_dim": 2},
    "_to_sparse_csr": {},
    "_to_sparse_csc": {},
    "_to_sparse_bsr": {"blocksize": [1, 1]},
    "_to_sparse_bsc": {"blocksize": [2, 1], "real_only": True},
}

for _name, _arguments in _CONVERSIONS.items():
    _operator = operator(f"aten::{_name}")
    _compressed = "_cs" in _name or "_bs" in _name
    rule(
        f"aten::{_name}",
        vjp={"self": to_sparse_backward},
        jvp={"result": no_tangent},
        kind="linear",
        sparse=True,
        gaps=OF_COMPRESSED | OF_SPARSE_RESULTS if _compressed else OF_SPARSE_RESULTS,
        improves="missing",
        source="ATen to_sparse_backward; for complex numbers new",
        samples=_dense_samples(**_arguments),
        probe=made_dense(_operator) if _name == "_to_sparse_bsc" else times_identity(_operator),
    )
