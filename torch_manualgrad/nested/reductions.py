"""Reductions, softmax and cumulative sums of nested tensors.

Dims are counted as on the nested tensor: 0 is the batch. Over dense dims, the dense operator acts on the buffer; over
the ragged dim, or over it and dense ones, the formulas of `segments` do. The batch can be reduced together with the
ragged dim only. The entries of a batch with several ragged dims are reordered so that those that are reduced together
are contiguous (`_Lines`); it is then a batch with a single ragged dim.

The result over the ragged dim is an ordinary tensor, whose dim 0 is the batch; over dense dims only, and with several
ragged dims, it is a nested tensor again. Every function takes a `Ragged` or one of torch's nested tensors and returns
the same kind. All are differentiable in every mode and to any order.

Empty components: a sum of 0, a product of 1, a mean and variance of nan, a logsumexp of -inf, a norm of 0. An extremum
there is an error on the CPU; where the lengths cannot be read without synchronizing, it is +-inf with no gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.internals import only_autograd
from .conversion import on_nested
from .packing import packed_from_flat, row_strides, segments
from .ragged import Ragged
from .segments import (
    _nested_sum_backward,
    log_softmaxes,
    maxima,
    segment_amax,
    segment_sum,
    softmaxes,
    sums,
    wide,
)

__all__ = [
    "Extremum",
    "amax",
    "amin",
    "cumsum",
    "glu",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "prod",
    "softmax",
    "std",
    "sum",
    "var",
    "vector_norm",
]

Dims = int | Sequence[int] | None


class Extremum(NamedTuple):
    """The largest or smallest entries, and the index, within the component, of the first of each."""

    values: Any
    indices: Any


# -- slices -----------------------------------------------------------------------------------------------------------


class _Slices:
    """Values, and the dims that are reduced: the `dense` ones, or the dim `along`, which `offsets` divide.

    A reduced tensor keeps its dims, with size 1 in the `dense` ones, and B in `along`.
    """

    def __init__(
        self, values: Tensor, dense: Sequence[int], along: int | None = None, offsets: Tensor | None = None
    ) -> None:
        self.values = values
        self.dense = list(dense)
        self.along = along
        self._offsets = offsets

    @property
    def packed(self) -> int:
        """`along`, if there is one."""
        assert self.along is not None
        return self.along

    @property
    def offsets(self) -> Tensor:
        """The offsets that divide `packed`."""
        assert self._offsets is not None
        return self._offsets

    def sum(self, x: Tensor) -> Tensor:
        if self.along is None:
            return x.sum(self.dense, keepdim=True)
        if not (x.is_floating_point() or x.is_complex()):
            return segment_sum.reference(x.long(), self.offsets, self.along)
        return sums(x, self.offsets, self.along)

    def amax(self, x: Tensor) -> Tensor:
        if self.along is None:
            return x.amax(self.dense, keepdim=True)
        if not x.is_floating_point():
            return segment_amax.reference(x, self.offsets, self.along)
        return maxima(x, self.offsets, self.along)

    def shift(self, x: Tensor) -> Tensor:
        """A constant per slice near its largest entries: finite, also for an empty slice."""
        x = x.detach()
        if self.along is None and not x.numel():
            return x.sum(self.dense, keepdim=True)
        m = self.amax(x)
        return torch.where(m.isfinite(), m, 0)

    def expand(self, reduced: Tensor) -> Tensor:
        """A reduced tensor, repeated at each entry of its slice; dense dims broadcast by themselves."""
        if self.along is None:
            return reduced
        inexact = reduced.is_floating_point() or reduced.is_complex()
        repeat = _nested_sum_backward.op if inexact else _nested_sum_backward.reference
        return repeat(reduced, self.offsets, self.values.shape[self.along], self.along)

    def counts(self) -> Tensor | int:
        """The number of entries in each slice."""
        if self.along is None:
            return math.prod(self.values.shape[d] for d in self.dense)
        return self._in_place(self.offsets.diff())

    def positions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The position of each entry of x along `along`, and that of the beginning of its slice."""
        count = x.shape[self.packed]
        here = torch.arange(count, device=self.offsets.device)
        return self._in_place(here), self._in_place(self.offsets[segments(self.offsets, count)].long())

    def _in_place(self, x: Tensor) -> Tensor:
        return x.reshape([-1 if d == self.along else 1 for d in range(self.values.dim())])


def _dims(x: Ragged, dim: Dims) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.dim()))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    found = sorted(x.wrapped(d) for d in given)
    if len({*found}) < len(found):
        raise RuntimeError(f"dim: a dim appears twice in {list(given)}")
    if not found:
        return tuple(range(x.dim()))
    if found[0] == 0 and not {*x.ragged_dims} <= {*found}:
        raise ValueError(f"dim: the batch is reduced only together with the ragged dims {x.ragged_dims}, got {dim}")
    return tuple(found)


def _one_dim(x: Ragged, dim: int) -> int:
    found = x.wrapped(dim)
    if found == 0:
        raise ValueError(f"dim: expected a dim of the components, got {dim}, the batch")
    return found


def _reduce(x: Ragged, dim: Dims, keepdim: bool, function: Callable[[_Slices], Any]) -> Any:
    """Apply ``function``, which reduces slices, and give its result (or results) the nested shape."""
    dims = _dims(x, dim)
    if x.sizes is not None and dims[0] != 0:
        if len(dims) == x.dim() - 1:
            x, dims, kept = Ragged(x.values, x.offsets, (x.shape[0], None)), (1,), len(dims)
            found = _reduce(x, 1, False, function)
            return _each(found, lambda r: r.reshape(-1, *[1] * kept)) if keepdim else found
        if len(dims) > 1:
            raise ValueError(f"dim: with several ragged dims, expected one dim or all of the components', got {dim}")
        lines = _Lines(x, dims[0])
        offsets, rebuilt = lines.reduced(keepdim)
        return _each(function(_Slices(lines.values, (), 0, offsets)), rebuilt)
    packed = x.packed_dim
    if dims[0] == 0 or packed + 1 not in dims:
        # if the batch is reduced too, the ragged dim of the buffer is reduced as a dense one
        dense = range(x.values.dim()) if dims[0] == 0 and x.sizes is not None else [d - 1 for d in dims if d]
        return _each(function(_Slices(x.values, dense)), lambda r: _dense_result(x, r, dims, keepdim))
    dense = [d - 1 for d in dims if d != packed + 1]
    return _each(function(_joined(x, packed, dense)), lambda r: _batch_result(r, packed, dense, keepdim))


def _each(found: Any, function: Callable[[Tensor], Any]) -> Any:
    return Extremum(*map(function, found)) if isinstance(found, tuple) else function(found)


def _joined(x: Ragged, packed: int, dense: Sequence[int]) -> _Slices:
    """The slices with the dense dims flattened into the ragged one, so that one dim is reduced."""
    if not dense:
        return _Slices(x.values, (), packed, x.offsets)
    at = packed - len([d for d in dense if d < packed])
    values = x.values.movedim((packed, *dense), tuple(range(at, at + len(dense) + 1)))
    size = math.prod(x.values.shape[d] for d in dense)
    return _Slices(values.flatten(at, at + len(dense)), (), at, x.offsets.long() * size)


def _batch_result(reduced: Tensor, packed: int, dense: Sequence[int], keepdim: bool) -> Tensor:
    at = packed - len([d for d in dense if d < packed])
    found = reduced.movedim(at, 0) if at else reduced
    for d in sorted((packed, *dense)) if keepdim else ():
        found = found.unsqueeze(d + 1)
    return found


def _dense_result(x: Ragged, reduced: Tensor, dims: Sequence[int], keepdim: bool) -> Ragged | Tensor:
    if dims[0] == 0:
        if x.sizes is not None:
            return reduced.reshape([1] * x.dim() if keepdim else [])
        return reduced.unsqueeze(0) if keepdim else reduced.squeeze([d - 1 for d in dims if d])
    if keepdim:
        return x.like(reduced, [1 if d in dims else n for d, n in enumerate(x.shape)])
    shape = [n for d, n in enumerate(x.shape) if d not in dims]
    return x.like(reduced.squeeze([d - 1 for d in dims]), shape)


class _Lines:
    """A batch with several ragged dims, its entries reordered so that those along one dim are contiguous.

    Attributes:
        values: (N,), the entries in that order: component by component, line by line.
        back: (N,), the index of each entry of the batch among them.
    """

    def __init__(self, x: Ragged, dim: int) -> None:
        self.batch, self.dim = x, dim
        self.sizes = x.component_sizes()
        step, size = row_strides(self.sizes)[:, dim - 1], self.sizes[:, dim - 1]
        which = x.segment_ids()
        start, step, size = x.offsets[which], step[which], size[which]
        here = torch.arange(len(which), device=x.offsets.device)
        local = here - start
        along = local // step % size
        line = local // (step * size) * step + local % step
        self.back = start + line * size + along
        order = torch.empty_like(here).scatter(0, self.back, here)
        self.values = x.values.index_select(0, order)
        self._along = along[order]

    def offsets(self) -> Tensor:
        """Where lines begin, for the largest possible number of lines: the last are empty. Does not synchronize."""
        line = (self._along == 0).cumsum(0)
        return torch.searchsorted(line, torch.arange(1, len(line) + 2, device=line.device))

    def reduced(self, keepdim: bool) -> tuple[Tensor, Callable[[Tensor], Ragged]]:
        """Where lines begin, empty ones too; and a function that makes a nested tensor of one value for each.

        It synchronizes: the number of lines depends on the sizes.
        """
        x, at = self.batch, self.dim - 1
        others = torch.cat([self.sizes[:, :at], self.sizes[:, at + 1 :]], 1)
        counts = others.prod(1)
        count = int(counts.sum())
        which = torch.repeat_interleave(counts, output_size=count)
        line = torch.arange(count, device=counts.device) - (counts.cumsum(0) - counts)[which]
        starts = x.offsets[which] + line * self.sizes[which, at]
        offsets = torch.cat([starts, torch.full_like(starts[:1], len(self.back)) if count else starts.new_zeros(1)])

        shape = [n for d, n in enumerate(x.shape) if d != self.dim]
        ragged = [d - 1 for d, n in enumerate(shape) if n is None]
        lengths = counts if len(ragged) > 1 else others[:, ragged[0]]
        begins = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(x.offsets.dtype)

        def rebuilt(flat: Tensor) -> Ragged:
            if len(ragged) > 1:
                full = shape if not keepdim else [*shape[: self.dim], 1, *shape[self.dim :]]
                return Ragged(flat, begins, full, others[:, ragged].to(x.offsets.dtype))
            total = int(lengths.sum())
            values = packed_from_flat(flat, begins, [total if n is None else n for n in shape[1:]], ragged[0])
            if not keepdim:
                return Ragged(values, begins, shape)
            return Ragged(values.unsqueeze(at), begins, [*shape[: self.dim], 1, *shape[self.dim :]])

        return offsets, rebuilt


def _map(x: Ragged, dim: int, dense: Callable[[Tensor, int], Tensor], ragged: Callable[[_Slices], Tensor]) -> Ragged:
    """A function along one dim of the components that keeps their sizes."""
    dim = _one_dim(x, dim)
    if x.sizes is not None:
        lines = _Lines(x, dim)
        return x.like(ragged(_Slices(lines.values, (), 0, lines.offsets())).index_select(0, lines.back))
    if dim - 1 != x.packed_dim:
        return x.like(dense(x.values, dim - 1))
    return x.like(ragged(_Slices(x.values, (), dim - 1, x.offsets)))


# -- sums -------------------------------------------------------------------------------------------------------------


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
        ValueError: the batch without the ragged dim; with several ragged dims, more than one of the components' dims,
            but not all.
        RuntimeError: a dim twice.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen sum.dim_IntList, _nested_sum_backward.
    """
    return _reduce(x, dim, keepdim, lambda s: s.sum(s.values))


def _mean(s: _Slices, x: Tensor) -> Tensor:
    return s.sum(x) / s.counts()


@on_nested
def mean(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The mean over ``dim``, as `torch.mean`: the sum over each component's own length.

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
    _require_inexact(x, "mean")
    return _reduce(x, dim, keepdim, lambda s: _mean(s, wide(s.values)).to(x.values.dtype))


def _variance(s: _Slices, correction: float) -> Tensor:
    x = wide(s.values)
    d = x - s.expand(_mean(s, x))
    square = (d.conj() * d).real if d.is_complex() else d * d
    counts = s.counts()
    free = counts - correction
    total = s.sum(square)
    return total / (free.clamp(min=0) if isinstance(free, Tensor) else total.new_tensor(free).clamp(min=0))


@on_nested
def var(x: Ragged, dim: Dims = None, *, correction: float = 1, keepdim: bool = False) -> Ragged | Tensor:
    """The variance over ``dim``, as `torch.var`: sum |x - mean|^2 / (count - correction); nan with too few entries.

    Args:
        x: floating point or complex.
        dim: as in `sum`.
        keepdim: as in `sum`.
        correction: is subtracted from the count.

    Returns:
        As `sum`, real.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen var.correction.
    """
    _require_inexact(x, "var")
    real = x.values.dtype.to_real()
    return _reduce(x, dim, keepdim, lambda s: _variance(s, correction).to(real))


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
        Where not differentiable: where all entries are equal; there every derivative is 0.

    References:
        ATen std.correction.
    """
    _require_inexact(x, "std")
    real = x.values.dtype.to_real()

    def root(s: _Slices) -> Tensor:
        v = _variance(s, correction)
        return torch.where(v == 0, 0, torch.where(v == 0, 1, v).sqrt()).to(real)

    return _reduce(x, dim, keepdim, root)


@on_nested
def logsumexp(x: Ragged, dim: Dims, keepdim: bool = False) -> Ragged | Tensor:
    """log sum exp(x) over ``dim``, as `torch.logsumexp`.

    Args:
        x: floating point or complex.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: a slice that is empty or holds only -inf gives -inf, with every derivative 0.

    References:
        ATen logsumexp.
    """
    _require_inexact(x, "logsumexp")

    def function(s: _Slices) -> Tensor:
        v = wide(s.values)
        m = s.shift(v.real if v.is_complex() else v)
        total = s.sum((v - s.expand(m)).exp())
        nothing = total == 0
        return torch.where(nothing, -torch.inf, torch.where(nothing, 1, total).log() + m).to(x.values.dtype)

    return _reduce(x, dim, keepdim, function)


@on_nested
def vector_norm(x: Ragged, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The vector norm over ``dim``, as `torch.linalg.vector_norm`; scaled by the largest entry against overflow.

    Args:
        x: floating point or complex.
        ord: any real, inf or -inf.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`, real.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: where derivatives/reduction/norm.py says. Where the norm is 0, and at entries of 0,
        every derivative is 0 (for an even ``ord`` the norm is smooth at the latter); entries that attain an extreme
        share its gradient.

    References:
        ATen linalg_vector_norm.
    """
    _require_inexact(x, "vector_norm")
    real = x.values.dtype.to_real()
    return _reduce(x, dim, keepdim, lambda s: _norm(s, float(ord)).to(real))


def _norm(s: _Slices, p: float) -> Tensor:
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


# -- products and cumulative sums -------------------------------------------------------------------------------------


def _scan(s: _Slices, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor], neutral: int) -> Tensor:
    """Each position combined with all before it in its slice, in log2(T) passes that only multiply and add."""
    dim = s.packed
    here, start = s.positions(x)
    step = 1
    while step < x.shape[dim]:
        x = combine(x, torch.where(here - start >= step, x.roll(step, dim), neutral))
        step *= 2
    return x


def _product(s: _Slices) -> Tensor:
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
    full = _scan(s, x, torch.mul, 1).index_select(s.along, ends)
    return torch.where(lengths == 0, 1, full)


@on_nested
def prod(x: Ragged, dim: int | None = None, keepdim: bool = False) -> Ragged | Tensor:
    """The product over one dim, or over all, as `torch.prod`: without a division, so zeros are not special.

    Args:
        x: floating point or complex.
        dim: one dim; None for all.
        keepdim: as in `sum`.

    Returns:
        As `sum`.

    Raises:
        IndexError, ValueError, RuntimeError, TypeError: as `mean`.

    Note:
        Where not differentiable: nowhere, it is a polynomial.

    References:
        ATen prod.dim_int.
    """
    _require_inexact(x, "prod")
    return _reduce(x, dim, keepdim, lambda s: _product(s).to(x.values.dtype))


@on_nested
def cumsum(x: Ragged, dim: int) -> Ragged:
    """The cumulative sum along a dim of the components, as `torch.cumsum`.

    Args:
        x: the nested tensor.
        dim: a dim of the components.

    Returns:
        The kind and shape of ``x``; integers in int64.

    Raises:
        IndexError: a dim out of range.
        ValueError: the batch.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen cumsum.
    """

    def along(s: _Slices) -> Tensor:
        v = s.values
        v = wide(v) if v.is_floating_point() or v.is_complex() else v.long()
        return _scan(s, v, torch.add, 0).to(torch.int64 if v.dtype == torch.int64 else x.values.dtype)

    return _map(x, dim, torch.cumsum, along)


# -- softmax ----------------------------------------------------------------------------------------------------------


def _dense_softmax(x: Tensor, dim: int, log: bool = False) -> Tensor:
    """torch.softmax, or log_softmax, without PyTorch's tangent, which overwrites what a backward through it needs."""
    if torch.compiler.is_compiling() or only_autograd() or not x.numel():
        return torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
    shifted = wide(x - x.detach().amax(dim, keepdim=True))
    e = shifted.exp()
    total = e.sum(dim, keepdim=True)
    return (shifted - total.log() if log else e / total).to(x.dtype)


@on_nested
def softmax(x: Ragged, dim: int, dtype: torch.dtype | None = None) -> Ragged:
    """The softmax along a dim of the components, as `torch.softmax`.

    Args:
        x: real.
        dim: a dim of the components.
        dtype: ``x`` is converted to it first; None for the dtype of ``x``.

    Returns:
        The kind and shape of ``x``.

    Raises:
        IndexError: a dim out of range.
        ValueError: the batch.
        RuntimeError: a dtype without a softmax.

    Note:
        Where not differentiable: nowhere; a slice with nan or +inf, or with only -inf, is nan.

    References:
        ATen softmax_nested, nested_softmax_backward.
    """
    return _map(
        x if dtype is None else x.like(x.values.to(dtype)),
        dim,
        _dense_softmax,
        lambda s: softmaxes(s.values, s.offsets, s.packed),
    )


@on_nested
def log_softmax(x: Ragged, dim: int, dtype: torch.dtype | None = None) -> Ragged:
    """The logarithm of the softmax along a dim of the components, as `torch.log_softmax`.

    Args:
        x: real.
        dim: as in `softmax`.
        dtype: as in `softmax`.

    Returns:
        The kind and shape of ``x``.

    Raises:
        IndexError, ValueError, RuntimeError: as `softmax`.

    Note:
        Where not differentiable: as `softmax`.

    References:
        ATen _log_softmax_backward_data.
    """
    return _map(
        x if dtype is None else x.like(x.values.to(dtype)),
        dim,
        functools.partial(_dense_softmax, log=True),
        lambda s: log_softmaxes(s.values, s.offsets, s.packed),
    )


@on_nested
def glu(x: Ragged, dim: int = -1) -> Ragged:
    """a sigmoid(b), with a and b the halves of x along a dense dim, as `torch.nn.functional.glu`.

    Args:
        x: real, with one ragged dim.
        dim: a dense dim of even size.

    Returns:
        The kind of ``x``, half as large in ``dim``.

    Raises:
        IndexError: a dim out of range.
        ValueError: the batch, a ragged dim, an odd size, several ragged dims.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen glu.
    """
    at = _one_dim(x, dim)
    size = x.shape[at]
    if x.sizes is not None or size is None or size % 2:
        raise ValueError(f"dim: expected a dense dim of even size, got {dim} of a batch of shape {x.shape}")
    half = [n if d != at else size // 2 for d, n in enumerate(x.shape)]
    return x.like(torch.nn.functional.glu(x.values, at - 1), half)


# -- extrema ----------------------------------------------------------------------------------------------------------


def _largest(s: _Slices) -> Tensor:
    _refuse_empty(s)
    return s.amax(s.values)


def _smallest(s: _Slices) -> Tensor:
    _refuse_empty(s)
    if not s.values.is_floating_point():
        return ~s.amax(~s.values)  # the negative of the least integer overflows
    return -s.amax(-s.values)


@on_nested
def amax(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The largest entry over ``dim``, as `torch.amax`.

    Args:
        x: real.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`, in the dtype of ``x``.

    Raises:
        IndexError: a dim out of range; an empty slice, where that can be read (see the module's docstring).
        ValueError, RuntimeError: as `sum`.

    Note:
        Where not differentiable: at ties, whose entries share the gradient equally.

    References:
        ATen amax.
    """
    return _reduce(x, dim, keepdim, _largest)


@on_nested
def amin(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The smallest entry over ``dim``, as `torch.amin`.

    Args:
        x: real.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `amax`.

    Raises:
        IndexError, ValueError, RuntimeError: as `amax`.

    Note:
        Where not differentiable: as `amax`.

    References:
        ATen amin.
    """
    return _reduce(x, dim, keepdim, _smallest)


def _first(s: _Slices, largest: bool) -> Extremum:
    x, dim = s.values, s.along
    _refuse_empty(s)
    if dim is None:
        found = (torch.max if largest else torch.min)(x, s.dense[0], keepdim=True)
        return Extremum(found.values, found.indices)
    here, start = s.positions(x)
    extreme = (_largest if largest else _smallest)(_Slices(x.detach(), (), dim, s.offsets))
    attained = (x == s.expand(extreme)) | (x != x)
    count = x.shape[dim]
    at = -segment_amax.reference(torch.where(attained, -here, -count), s.offsets, dim)  # the first position
    nothing = (s.offsets.diff() == 0).reshape([-1 if d == dim else 1 for d in range(x.dim())])
    at = at.clamp(0, count - 1)
    values = torch.where(nothing, extreme, x.gather(dim, at))
    begin = s.offsets[:-1].long().reshape(nothing.shape)
    return Extremum(values, torch.where(nothing, 0, at - begin))


def _extremum(x: Ragged, dim: int | None, keepdim: bool, largest: bool) -> Any:
    if dim is None:
        if keepdim:
            raise ValueError("keepdim: given without a dim")
        return (torch.max if largest else torch.min)(x.values)
    _one_dim(x, dim)
    return _reduce(x, dim, keepdim, functools.partial(_first, largest=largest))


@on_nested
def max(x: Ragged, dim: int | None = None, keepdim: bool = False) -> Any:
    """The largest entry of all, or over one dim with its index, as `torch.max`.

    Args:
        x: real.
        dim: a dim of the components; None: over all entries, a tensor.
        keepdim: whether the reduced dim stays, with size 1.

    Returns:
        `Extremum`: values and indices, each as from `sum`. Indices are within the component, of the first entry that
        attains the value.

    Raises:
        IndexError, RuntimeError: as `amax`.
        ValueError: the batch, or keepdim without a dim.

    Note:
        Where not differentiable: at ties, where the chosen entry has the whole gradient; over all entries, those that
        tie share it.

    References:
        ATen max.dim, value_selecting_reduction_backward.
    """
    return _extremum(x, dim, keepdim, True)


@on_nested
def min(x: Ragged, dim: int | None = None, keepdim: bool = False) -> Any:
    """The smallest entry of all, or over one dim with its index, as `torch.min`.

    Args:
        x: real.
        dim: as in `max`.
        keepdim: as in `max`.

    Returns:
        As `max`.

    Raises:
        IndexError, ValueError, RuntimeError: as `max`.

    Note:
        Where not differentiable: as `max`.

    References:
        ATen min.dim.
    """
    return _extremum(x, dim, keepdim, False)


def _require_inexact(x: Ragged, name: str) -> None:
    if not (x.values.is_floating_point() or x.values.is_complex()):
        raise TypeError(f"{name}: expected floating point or complex values, got {x.values.dtype}")


def _refuse_empty(s: _Slices) -> None:
    """Raise for empty slices, if the lengths can be read without synchronizing."""
    if s.along is None or s.offsets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = s.offsets.diff()
    if type(lengths) is Tensor and not lengths.all():
        at = int((lengths == 0).nonzero()[0])
        raise IndexError(f"x: component {at} is empty along the reduced dim, and has no extreme entry")
