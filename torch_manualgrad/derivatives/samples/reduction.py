"""Samples of the rules of reductions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, probe_for, samples_for

from ..reduction.distance import _differences, _pairs
from .drawing import spread

# -- cumulative --------------------------------------------------------------------------------------------------------


@samples_for("aten::cumprod")
def cumprod_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 5), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -2, dtype=torch.promote_types(dtype, torch.float64))
    yield Sample(torch.where((x == x[0, 1]) | (x == x[0, 3]), 0, x), 1)
    yield Sample(spread((), dtype, device), 0)
    yield Sample(spread((2, 0), dtype, device), -1)


@samples_for("aten::logcumsumexp")
def logcumsumexp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 5), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -1)
    yield Sample(spread((), dtype, device), 0)
    yield Sample(spread((2, 0), dtype, device), -1)


# -- distance ----------------------------------------------------------------------------------------------------------


aten = torch.ops.aten

_DISTANCE_ORDERS = (2.0, 3.0, 1.0, 0.5, 1.5, 2.5, 4.0, 0.0, math.inf)


@samples_for("aten::_euclidean_dist")
def euclidean_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for a, b in (((3, 2), (4, 2)), ((2, 3, 2), (2, 1, 2)), ((0, 2), (3, 2))):
        yield Sample(spread(a, dtype, device), spread(b, dtype, device, 1))


@samples_for("aten::_cdist_forward")
def cdist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _DISTANCE_ORDERS:
        yield Sample(spread((3, 4), dtype, device), spread((2, 4), dtype, device, 1), p, 2)
    for a, b in (((2, 1, 3, 2), (3, 2, 2)), ((0, 2), (3, 2)), ((3, 0), (2, 0)), ((1, 1), (1, 1))):
        yield Sample(spread(a, dtype, device), spread(b, dtype, device, 1), 2.5, None)


@samples_for("aten::_pdist_forward")
def pdist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _DISTANCE_ORDERS:
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
    """The backward with the distances of its own points, whatever distances it is given; it takes contiguous points only.

    Since 2.15, PyTorch's derivative has a term from the distances, so they are not constants here.
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
    torch.pdist(self.detach(), p)  # refuses shapes for which the backward's kernel would access memory out of bounds
    distances = torch.linalg.vector_norm(_pairs(self, self.shape[0])[2], p, -1)
    return torch.ops.aten._pdist_backward(grad.contiguous(), self, p, distances)


# -- extrema -----------------------------------------------------------------------------------------------------------


@samples_for("aten::aminmax")
def aminmax_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = spread((2, 3), dtype, device)
    yield Sample(x, dim=1)
    yield Sample(x.mT, dim=-1, keepdim=True)
    yield Sample(x)
    yield Sample(spread((), dtype, device), dim=0)
    yield Sample(spread((0, 2), dtype, device), dim=1)


@samples_for("aten::amax", "aten::amin")
def some_dims(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x, [1])
    yield Sample(x.mT, [0, -1], True)
    yield Sample(x)
    yield Sample(spread((), dtype, device), [-1])
    yield Sample(spread((0, 2), dtype, device), [1])


@samples_for("aten::max", "aten::min", "aten::median", "aten::nanmedian")
def all_dims(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    yield Sample(spread((2, 4), dtype, device))
    yield Sample(spread((3, 3), dtype, device).mT)
    yield Sample(spread((), dtype, device))


# -- logsumexp ---------------------------------------------------------------------------------------------------------


@samples_for("aten::logsumexp")
def logsumexp_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x, [1])
    yield Sample(x.mT, [0, -1], True)
    yield Sample(torch.where(x == x[0, 1, 1], -torch.inf, x), [-2]) if not dtype.is_complex else Sample(x, [0])
    yield Sample(spread((), dtype, device), [-1])
    yield Sample(spread((0, 2), dtype, device), [1])


# -- norm --------------------------------------------------------------------------------------------------------------


_NORM_ORDERS = (2.0, 3.0, 1.0, 0.5, 1.5, 2.5, 4.0, -1.0, -2.5, 0.0, math.inf, -math.inf)


@samples_for("aten::norm.Scalar")
def whole_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _NORM_ORDERS:
        yield Sample(spread((3, 4), dtype, device), p)
    yield Sample(spread((), dtype, device), 3.0)
    yield Sample(spread((3, 4), dtype, device).mT, 2.5)
    yield Sample(spread((0,), dtype, device), 2.0)


@samples_for("aten::norm.ScalarOpt_dim")
def norm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _NORM_ORDERS:
        yield Sample(spread((3, 4, 2), dtype, device), p, [1])
    for dim, keepdim in (([0, -1], False), ([-1, 0], True), ([], False)):
        yield Sample(spread((3, 4, 2), dtype, device), 2.5, dim, keepdim)
    yield Sample(spread((), dtype, device), 3.0, [-1], True)
    yield Sample(spread((3, 0), dtype, device), 2.0, [0], True)
    yield Sample(spread((3, 4, 2), dtype, device).mT, None, [1], False)


@samples_for("aten::linalg_vector_norm")
def vector_norm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in norm_samples(dtype, device):
        x, p, *rest = sample.args
        yield Sample(x, 2.0 if p is None else p, *rest)
    yield Sample(spread((3, 4), dtype, device))
    yield Sample(spread((3, 4), dtype, device), 3.0, dtype=torch.promote_types(dtype, torch.float64))


@samples_for("aten::norm.ScalarOpt_dtype")
def norm_dtype_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return  # this forward takes no dtype for complex input
    for p in (None, 3.0, 1.5, math.inf):
        yield Sample(spread((3, 4), dtype, device), p, dtype=torch.float64)


@samples_for("aten::norm.ScalarOpt_dim_dtype")
def norm_dim_dtype_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    for p, keepdim in ((None, False), (3.0, True), (1.5, False), (-1.0, True)):
        yield Sample(spread((3, 4), dtype, device), p, [1], keepdim, dtype=torch.float64)


@samples_for("aten::dist")
def dist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for p in _NORM_ORDERS:
        yield Sample(spread((3, 4), dtype, device), spread((3, 4), dtype, device, 1), p)
    yield Sample(spread((3, 1, 2), dtype, device), spread((4, 1), dtype, device, 1), 2.5)
    yield Sample(spread((), dtype, device), spread((3,), dtype, device, 1))


# -- products ----------------------------------------------------------------------------------------------------------


@samples_for("aten::prod")
def products_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3), dtype, device)
    yield Sample(x)
    yield Sample(x.mT, dtype=torch.promote_types(dtype, torch.float64))
    yield Sample(torch.where(x == x.flatten()[2], 0, x))
    yield Sample(spread((), dtype, device))
    yield Sample(spread((0, 2), dtype, device))


@samples_for("aten::prod.dim_int")
def products_dim_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 5), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -2, True, dtype=torch.promote_types(dtype, torch.float64))
    yield Sample(torch.where(x == x[0, 2], 0, x), 0)
    yield Sample(spread((), dtype, device), -1)
    yield Sample(spread((2, 0), dtype, device), 1)


# -- renorm ------------------------------------------------------------------------------------------------------------


@samples_for("aten::renorm")
def renorm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((3, 4, 2), dtype, device) * torch.tensor([0.05, 1, 2], device=device).reshape(3, 1, 1).to(dtype)
    for p in (2.0, 3.0, 1.0, 0.5, 1.5, math.inf):
        yield Sample(x, p, 0, 1.0)
    yield Sample(x, 2.5, -1, 0.7)
    yield Sample(x, 2.0, 1, 100.0)


# -- segment reduce ----------------------------------------------------------------------------------------------------


@samples_for("aten::segment_reduce")
def segment_reduce_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(0.3, 2.9, 10, dtype=dtype, device=device).reshape(5, 2).sin() + 0.2
    lengths = torch.tensor([2, 0, 3], device=device)
    offsets = torch.tensor([[0, 2, 3], [0, 1, 3]], device=device)
    yield Sample(x, "sum", lengths=lengths)
    yield Sample(x, "mean", lengths=lengths[::2])
    yield Sample(x, "max", lengths=lengths[::2])
    yield Sample(x[:3].mT.contiguous(), "min", offsets=offsets, axis=1, initial=9)
    yield Sample(x, "prod", lengths=lengths, initial=2)


# -- selection ---------------------------------------------------------------------------------------------------------


def _samples(*arguments: dict[str, Any], empty: dict[str, Any] | None = None) -> Sampler:
    """A matrix with each of the arguments, a number with the first of them, and an empty matrix."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = spread((3, 4), dtype, device)
        for position, given in enumerate(arguments):
            yield Sample(x.mT if position % 2 else x, **given)
        first = {name: value for name, value in arguments[0].items() if name not in ("dim", "k")}
        if "k" in arguments[0]:
            first["k"] = 1
        yield Sample(spread((), dtype, device), **first, dim=-1)
        if empty is not None:
            yield Sample(spread((0, 3), dtype, device), **empty)

    return samples


samples_for("aten::max.dim", "aten::min.dim", "aten::median.dim", "aten::nanmedian.dim", "aten::mode")(
    _samples({"dim": 0}, {"dim": -1, "keepdim": True}, empty={"dim": 1})
)
samples_for("aten::kthvalue")(_samples({"k": 2, "dim": 0}, {"k": 3, "keepdim": True}, empty={"k": 1, "dim": 1}))
samples_for("aten::sort")(_samples({"dim": 0}, {"descending": True}, empty={"dim": 0}))
samples_for("aten::sort.stable")(
    _samples({"stable": True, "dim": 0}, {"stable": None, "descending": True}, empty={"stable": False, "dim": 0})
)
samples_for("aten::topk")(_samples({"k": 2, "dim": 0}, {"k": 3, "largest": False}, empty={"k": 2, "dim": 1}))
samples_for("aten::cummax", "aten::cummin")(_samples({"dim": 0}, {"dim": -1}, empty={"dim": 0}))


# -- sums --------------------------------------------------------------------------------------------------------------


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64)


@samples_for("aten::sum", "aten::mean")
def sums_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3), dtype, device)
    yield Sample(x)
    yield Sample(x.mT, dtype=_wider(dtype))
    yield Sample(spread((), dtype, device))
    yield Sample(spread((0, 2), dtype, device))


@samples_for("aten::sum.dim_IntList", "aten::mean.dim")
def sums_dim_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x, [1])
    yield Sample(x.mT, [0, -1], True)
    yield Sample(x, [], dtype=_wider(dtype))
    yield Sample(x, None)
    yield Sample(spread((), dtype, device), [-1])
    yield Sample(spread((2, 0), dtype, device), [1])


@samples_for("aten::nansum")
def nansum_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    for sample in sums_dim_samples(dtype, device):
        if sample.args[1] != []:  # PyTorch's fake kernel takes it for no dims
            yield sample
    x = spread((2, 3), dtype, device)
    yield Sample(torch.where(x > 1, torch.nan, x), [0], dtype=_wider(dtype))


@samples_for("aten::cumsum")
def cumsum_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3), dtype, device)
    yield Sample(x, 1)
    yield Sample(x.mT, -2, dtype=_wider(dtype))
    yield Sample(spread((), dtype, device), 0)
    yield Sample(spread((2, 0), dtype, device), -1)


@samples_for("aten::trace")
def trace_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for m, n in ((2, 3), (3, 3), (0, 2)):
        yield Sample(spread((m, n), dtype, device))


# -- variance ----------------------------------------------------------------------------------------------------------


@samples_for("aten::var.correction", "aten::std.correction", "aten::var_mean.correction", "aten::std_mean.correction")
def variance_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x = spread((2, 3, 2), dtype, device)
    yield Sample(x)
    yield Sample(x, [1], correction=0)
    yield Sample(x.mT, [0, -1], correction=1.5, keepdim=True)
