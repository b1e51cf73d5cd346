"""Samples of pairwise distances and their backward operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ...reduction.distance import _differences, _pairs
from ..drawing import spread

aten = torch.ops.aten

_ORDERS = (2.0, 3.0, 1.0, 0.5, 1.5, 2.5, 4.0, 0.0, math.inf)


@samples_for("aten::_euclidean_dist")
def euclidean_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for a, b in (((3, 2), (4, 2)), ((2, 3, 2), (2, 1, 2)), ((0, 2), (3, 2))):
        yield Sample(spread(a, dtype, device), spread(b, dtype, device, 1))


@samples_for("aten::_cdist_forward")
def cdist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _ORDERS:
        yield Sample(spread((3, 4), dtype, device), spread((2, 4), dtype, device, 1), p, 2)
    for a, b in (((2, 1, 3, 2), (3, 2, 2)), ((0, 2), (3, 2)), ((3, 0), (2, 0)), ((1, 1), (1, 1))):
        yield Sample(spread(a, dtype, device), spread(b, dtype, device, 1), 2.5, None)


@samples_for("aten::_pdist_forward")
def pdist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _ORDERS:
        yield Sample(spread((4, 3), dtype, device), p)
    for shape in ((1, 3), (2, 1), (0, 2)):
        yield Sample(spread(shape, dtype, device), 2.5)


_BACKWARD_ORDERS = (2.0, 3.0, 1.0, 1.5, math.inf)


@samples_for("aten::_cdist_backward")
def cdist_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    shapes: Sequence[tuple[tuple[int, ...], ...]] = [((3, 2), (2, 2))] * len(_BACKWARD_ORDERS) + [
        ((2, 3, 2), (2, 2, 2))
    ]
    for p, (a, b) in zip((*_BACKWARD_ORDERS, 2.5), shapes):
        x1, x2 = spread(a, dtype, device), spread(b, dtype, device, 1)
        g = spread((*a[:-1], b[-2]), dtype, device, 2)
        yield Sample(g, x1, x2, p, torch.cdist(x1, x2, p, compute_mode="donot_use_mm_for_euclid_dist"))


@probe_for("aten::_cdist_backward")
def cdist_backward_probe(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    """The backward with the distances of its points, in place of any others; it takes contiguous points only.

    PyTorch's derivative, which it has since 2.15, has a part that goes by the distances: they are no constants here.
    """
    x1 = x1 + 0 * grad.sum(-1, keepdim=True)  # the operator's batching rule is wrong where only grad is batched
    distances = torch.linalg.vector_norm(_differences(x1, x2), p, -1)
    return torch.ops.aten._cdist_backward(grad.contiguous(), x1.contiguous(), x2.contiguous(), p, distances)


@samples_for("aten::_pdist_backward")
def pdist_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    for p in _BACKWARD_ORDERS:
        x = spread((3, 2), dtype, device) / 2
        yield Sample(spread((3,), dtype, device, 2), x, p, torch.pdist(x, p))


@probe_for("aten::_pdist_backward")
def pdist_backward_probe(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    self = self.contiguous()
    torch.pdist(self.detach(), p)  # refuses shapes for which the backward's kernel would leave its memory
    distances = torch.linalg.vector_norm(_pairs(self, self.shape[0])[2], p, -1)
    return torch.ops.aten._pdist_backward(grad.contiguous(), self, p, distances)
