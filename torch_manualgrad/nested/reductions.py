"""Reductions of nested tensors: sums, and functions of sums.

Dims are counted as on the nested tensor: 0 is the batch. Over dense dims, the dense operator acts on the buffer; over
the ragged dim, alone or with dense dims, the formulas of `segments` do. The batch can be reduced together with the
ragged dim only. The entries of a batch with several ragged dims are reordered so that entries that are reduced together
are contiguous (`Lines`). The result is a batch with a single ragged dim.

A reduction over the ragged dim returns an ordinary tensor, whose dim 0 is the batch. A reduction over dense dims only, or
with several ragged dims, returns a nested tensor. Every function takes a `Ragged` or one of torch's nested tensors and
returns the same kind. All are differentiable in every mode and to any order.

Empty components: a sum of 0, a product of 1, a mean and variance of nan, a logsumexp of $-inf$, a norm of 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .conversion import on_nested
from .ragged import Ragged
from .segments import wide
from .slices import Dims, Slices, is_inexact, reduce, require_inexact, scan

__all__ = ["logsumexp", "mean", "prod", "std", "sum", "var", "vector_norm"]


@on_nested
def sum(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The sum over ``dim``, as `torch.sum`.

    Args:
        x: the nested tensor.
        dim: one or more dims; None for all. The module's docstring says what can be reduced together.
        keepdim: whether reduced dims stay, with size 1.

    Returns:
        A tensor (B, ...) if the ragged dim is reduced; else the kind of ``x``. Integers are summed in int64.

    Raises:
        IndexError: a dim out of range.
        ValueError: the batch without the ragged dim; with several ragged dims, more than one component dim but not all.
        RuntimeError: a dim twice.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen sum.dim_IntList, _nested_sum_backward.
    """
    return reduce(x, dim, keepdim, lambda s: s.sum(s.values))


def _real(x: Ragged) -> torch.dtype:
    """The dtype of absolute values, without ``dtype.to_real``, at which the compiler ends a graph."""
    return (x.values.real if x.values.is_complex() else x.values).dtype


def _mean(s: Slices, x: Tensor) -> Tensor:
    return s.sum(x) / s.counts()


@on_nested
def mean(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The mean over ``dim``, as `torch.mean`: the sum divided by each component's own length.

    Args:
        x: floating point or complex.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`.

    Raises:
        IndexError, ValueError, RuntimeError: as `sum`.
        TypeError: integers.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen mean.dim.
    """
    require_inexact(x)
    return reduce(x, dim, keepdim, lambda s: _mean(s, wide(s.values)).to(x.values.dtype))


def all_dims(x: Ragged, dim: Dims) -> Dims:
    """``dim``, with None replaced by all dims, so that holes are not counted; PyTorch has no value for a jagged tensor here."""
    return tuple(range(x.dim())) if dim is None else dim


def _variance(s: Slices, correction: float) -> Tensor:
    x = wide(s.values)
    d = x - s.expand(_mean(s, x))
    square = (d.conj() * d).real if d.is_complex() else d * d
    counts = s.counts()
    free = counts - correction
    total = s.sum(square)
    return total / (free.clamp(min=0) if isinstance(free, Tensor) else total.new_tensor(free).clamp(min=0))


@on_nested
def var(x: Ragged, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Ragged | Tensor:
    """The variance over ``dim``, as `torch.var`: $sum |x - mean|^2 / (count - correction)$; nan with too few entries.

    Args:
        x: floating point or complex.
        dim: as in `sum`.
        keepdim: as in `sum`.
        correction: subtracted from the count.

    Returns:
        As `sum`, real.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen var.correction.
    """
    require_inexact(x)
    real = _real(x)
    return reduce(x, all_dims(x, dim), keepdim, lambda s: _variance(s, correction).to(real))


@on_nested
def std(x: Ragged, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Ragged | Tensor:
    """The standard deviation over ``dim``, as `torch.std`: the square root of `var`.

    Args:
        x: floating point or complex.
        dim: as in `sum`.
        keepdim: as in `sum`.
        correction: as in `var`.

    Returns:
        As `sum`, real.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: where all entries are equal; every derivative is 0 there.

    References:
        ATen std.correction.
    """
    require_inexact(x)
    real = _real(x)

    def root(s: Slices) -> Tensor:
        v = _variance(s, correction)
        return torch.where(v == 0, 0, torch.where(v == 0, 1, v).sqrt()).to(real)

    return reduce(x, all_dims(x, dim), keepdim, root)


@on_nested
def logsumexp(x: Ragged, dim: Dims, keepdim: bool = False) -> Ragged | Tensor:
    """$log sum exp(x)$ over ``dim``, as `torch.logsumexp`.

    Args:
        x: integers are converted to the default dtype.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`.

    Raises:
        IndexError, ValueError, RuntimeError: as `sum`.

    Note:
        Where not differentiable: a slice that is empty or holds only $-inf$ gives $-inf$, with every derivative 0.

    References:
        ATen logsumexp.
    """
    x = x if is_inexact(x) else x.like(x.values.to(torch.get_default_dtype()))

    def function(s: Slices) -> Tensor:
        v = wide(s.values)
        m = s.shift(v.real if v.is_complex() else v)
        total = s.sum((v - s.expand(m)).exp())
        nothing = total == 0
        return torch.where(nothing, -torch.inf, torch.where(nothing, 1, total).log() + m).to(x.values.dtype)

    return reduce(x, all_dims(x, dim), keepdim, function)


@on_nested
def vector_norm(x: Ragged, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The vector norm over ``dim``, as `torch.linalg.vector_norm`; scaled by the largest entry against overflow.

    Args:
        x: floating point or complex.
        ord: any real, inf or $-inf$.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`, real.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: see derivatives/reduction/norm.py. Where the norm is 0, and at entries that are 0,
        every derivative is 0 (with an even ``ord`` the norm is smooth at such entries). Entries that attain an extremum
        share its gradient.

    References:
        ATen linalg_vector_norm.
    """
    require_inexact(x)
    real = _real(x)
    return reduce(x, all_dims(x, dim), keepdim, lambda s: _norm(s, float(ord)).to(real))


def _norm(s: Slices, p: float) -> Tensor:
    x = wide(s.values)
    zero = x == 0
    size = torch.where(zero, 0, torch.where(zero, 1, x).abs()) if x.is_complex() else x.abs()
    if p == 0:
        return s.sum(torch.where(zero, size, 1))
    if p == 1:
        return s.sum(size)
    if not size.numel():
        return s.sum(size)  # 0 for every slice
    if math.isinf(p):
        return s.amax(size) if p > 0 else -s.amax(-size)
    # the norm has degree 1: scaled by a constant m, it is right where its powers over- or underflow
    extreme = s.amax(size.detach()) if p > 0 else -s.amax(-size.detach())
    m = torch.where((extreme == 0) | ~extreme.isfinite(), 1, extreme)
    if p == 2:
        y = x / s.expand(m)
        power = (y.conj() * y).real if y.is_complex() else y * y
    else:
        power = torch.where(zero, 0, (torch.where(zero, 1, size) / s.expand(m)).pow(p))
    total = s.sum(power)
    nothing = (extreme == 0) | (total == 0)
    return torch.where(nothing, 0, m * torch.where(nothing, 1, total).pow(1 / p))


def _product(s: Slices) -> Tensor:
    x = wide(s.values)
    if s.along is None:
        for d in s.dense:
            while x.shape[d] > 1:
                half = x.shape[d] // 2
                pairs = x.narrow(d, 0, half) * x.narrow(d, half, half)
                x = torch.cat([pairs, x.narrow(d, 2 * half, x.shape[d] - 2 * half)], d)
            if not x.shape[d]:
                x = x.sum(d, keepdim=True).exp()  # 1
        return x
    lengths = s._in_place(s.offsets.diff())
    if not x.shape[s.along]:
        return s.sum(x).exp()  # 1 for every slice
    ends = (s.offsets[1:].long() - 1).clamp(0, x.shape[s.along] - 1)
    full = scan(s, x, torch.mul, 1).index_select(s.along, ends)
    return torch.where(lengths == 0, 1, full)


@on_nested
def prod(x: Ragged, dim: int | None = None, keepdim: bool = False) -> Ragged | Tensor:
    """The product over one dim, or over all, as `torch.prod`: without a division, so zeros are not special.

    Args:
        x: the nested tensor; integers are multiplied in int64.
        dim: one dim; None for all.
        keepdim: as in `sum`.

    Returns:
        As `sum`.

    Raises:
        IndexError, ValueError, RuntimeError: as `sum`.

    Note:
        Where not differentiable: nowhere, it is a polynomial.

    References:
        ATen prod.dim_int.
    """
    x = x if is_inexact(x) else x.like(x.values.long())
    return reduce(x, dim, keepdim, lambda s: _product(s).to(x.values.dtype))
