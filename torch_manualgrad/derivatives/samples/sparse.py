"""Samples of the rules of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, operator, probe_for, samples_for

from .drawing import random

# -- probes ------------------------------------------------------------------------------------------------------------


def times_identity(op: Any) -> Callable[..., Tensor]:
    """The operator, with its sparse result made dense by a product with the identity matrix."""

    def probe(*args: Any, **kwargs: Any) -> Tensor:
        found = op(*args, **kwargs)
        return found @ torch.eye(found.shape[1], dtype=found.dtype, device=found.device)

    return probe


def made_dense(op: Any) -> Callable[..., Tensor]:
    """The operator, with its result made dense and contiguous: PyTorch's fake kernels give it other strides."""
    return lambda *args, **kwargs: op(*args, **kwargs).to_dense(masked_grad=False).contiguous()


# -- construction ------------------------------------------------------------------------------------------------------


_PATTERN = [[0, 1, 1], [1, 0, 1]]


@samples_for("aten::_sparse_coo_tensor_with_dims_and_tensors")
def coo(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    kind = {"dtype": dtype, "layout": torch.sparse_coo, "device": torch.device(device)}
    at = torch.tensor([[0, 0, 1], [2, 1, 2]], device=device)
    yield Sample(2, 0, [2, 3], at, random(3, dtype=dtype, device=device), **kind)
    twice = torch.tensor([[0, 1, 0], [1, 0, 1]], device=device)
    yield Sample(2, 0, [2, 2], twice, random(3, dtype=dtype, device=device), **kind)


@samples_for("aten::sparse_compressed_tensor.comp_plain_value_size", "aten::_sparse_compressed_tensor_unsafe")
def compressed(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    kind = {"dtype": dtype}
    rows, columns = torch.tensor([0, 2, 4], device=device), torch.tensor([1, 2, 0, 2], device=device)
    yield Sample(rows, columns, random(4, dtype=dtype, device=device), [2, 3], layout=torch.sparse_csr, **kind)
    blocks = random(1, 2, 2, dtype=dtype, device=device)
    ends, at = torch.tensor([0, 0, 1], device=device), torch.tensor([1], device=device)
    yield Sample(ends, at, blocks, [4, 4], layout=torch.sparse_bsr, **kind)


def _dense_samples(*args: Any, real_only: bool = False, **kwargs: Any) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if real_only and dtype.is_complex:
            return
        pattern = torch.tensor(_PATTERN, dtype=dtype, device=device)
        yield Sample(random(2, 3, dtype=dtype, device=device) * pattern, *args, **kwargs)

    return samples


samples_for("aten::_to_sparse", "aten::_to_sparse_csr", "aten::_to_sparse_csc")(_dense_samples())
samples_for("aten::_to_sparse.sparse_dim")(_dense_samples(sparse_dim=2))
samples_for("aten::_to_sparse_bsr")(_dense_samples(blocksize=[1, 1]))
samples_for("aten::_to_sparse_bsc")(_dense_samples(blocksize=[2, 1], real_only=True))

for _name in (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_compressed_tensor_unsafe",
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_sparse_bsr",
):
    probe_for(f"aten::{_name}")(times_identity(operator(f"aten::{_name}")))
probe_for("aten::sparse_compressed_tensor.comp_plain_value_size")(
    times_identity(torch.ops.aten.sparse_compressed_tensor)
)
# a BSC matrix has no products, and PyTorch makes only real ones dense
probe_for("aten::_to_sparse_bsc")(made_dense(operator("aten::_to_sparse_bsc")))


# -- masks -------------------------------------------------------------------------------------------------------------


@samples_for("aten::sparse_mask")
def masks(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = random(2, 3, dtype=dtype, device=device)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=dtype, device=device)
    yield Sample(x, mask.to_sparse())


probe_for("aten::sparse_mask")(times_identity(torch.ops.aten.sparse_mask))


# -- products ----------------------------------------------------------------------------------------------------------


def _matrix(layout: torch.layout, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    pattern = torch.tensor([[0, 1, 1], [1, 0, 0]], device=device)
    return (random(2, 3, dtype=dtype, device=device) * pattern).to_sparse(layout=layout)


@samples_for("aten::_sparse_addmm")
def sparse_addmm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Only the dense inputs are differentiated: finite differences cannot move a sparse one."""
    bias = random(2, 2, dtype=dtype, device=device, seed=1)
    B = random(3, 2, dtype=dtype, device=device, seed=2)
    other = 0.5j - 1 if dtype.is_complex else 0.5
    yield Sample(bias, _matrix(torch.sparse_coo, dtype, device), B, beta=other, alpha=other)


@samples_for("aten::sparse_sampled_addmm")
def sampled_addmm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    A, B = (random(*s, dtype=dtype, device=device, seed=1) for s in ((2, 2), (2, 3)))
    other = 0.5j - 1 if dtype.is_complex else 0.5
    yield Sample(_matrix(torch.sparse_csr, dtype, device), A, B, alpha=other, beta=2)


probe_for("aten::sparse_sampled_addmm")(times_identity(torch.ops.aten.sparse_sampled_addmm))


@probe_for("aten::_sparse_addmm")
def sparse_addmm_probe(*args: Any, **kwargs: Any) -> Tensor:
    return torch.ops.aten._sparse_addmm(*args, **kwargs)  # a function: opcheck would check PyTorch's own operator


# -- reduced -----------------------------------------------------------------------------------------------------------


@samples_for("aten::_sparse_mm_reduce_impl")
def reduced(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Only the dense factor is differentiated: finite differences cannot move a sparse one."""
    pattern = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]], device=device)
    A = (random(3, 3, dtype=dtype, device=device) * pattern).to_sparse_csr()
    for reduce in () if dtype.is_complex else ("sum", "mean", "amax", "amin"):
        yield Sample(A, random(3, 2, dtype=dtype, device=device, seed=1), reduce)


probe_for("aten::_sparse_mm_reduce_impl")(lambda *args: torch.ops.aten._sparse_mm_reduce_impl(*args)[0])


# -- sums --------------------------------------------------------------------------------------------------------------
#
# Finite differences cannot move a sparse tensor: tests/derivatives/sparse makes it from its values.


def _samples(*args: Any, count: int = 1) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        pattern = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 1, 0]], device=device)
        x = [(random(3, 3, dtype=dtype, device=device, seed=i) * pattern).to_sparse() for i in range(count)]
        yield Sample(*x, *args)

    return samples


def _real(samples: Callable[..., Iterable[Sample]]) -> Callable[..., Iterable[Sample]]:
    return lambda dtype, device: () if dtype.is_complex else samples(dtype, device)


samples_for("aten::_sparse_sum.dim")(_samples([0]))
samples_for("aten::_sparse_softmax", "aten::_sparse_log_softmax")(_real(_samples(1, False)))
samples_for("aten::_sparse_sparse_matmul")(_samples(count=2))
for _name in ("_sparse_sum.dim", "_sparse_softmax", "_sparse_log_softmax", "_sparse_sparse_matmul"):
    probe_for(f"aten::{_name}")(made_dense(operator(f"aten::{_name}")))
