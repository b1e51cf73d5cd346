"""Samples of the constructors of sparse tensors, and of the conversions of dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_manualgrad.core.rule import Sample, operator, probe_for, samples_for

from ..drawing import random
from .drawing import made_dense, times_identity

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
# a matrix of blocks of columns has no products, and PyTorch makes only real ones dense
probe_for("aten::_to_sparse_bsc")(made_dense(operator("aten::_to_sparse_bsc")))
