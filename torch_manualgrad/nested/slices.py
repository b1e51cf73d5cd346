"""The slices that a reduction of a nested tensor reduces: along dense dims, or along the dim that offsets divide.

`reduce` and `map_along` convert the dims of any call to this form, and convert the results back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lines import Lines
from .packing import segments
from .ragged import Ragged
from .segment_maxima import maxima, segment_amax
from .segments import _nested_sum_backward, repeated, segment_sum, sums

__all__ = ["Dims", "Extremum", "Slices", "is_inexact", "map_along", "one_dim", "reduce", "require_inexact", "scan"]

Dims = int | Sequence[int] | None


class Extremum(NamedTuple):
    """The largest or smallest entries, and the index, within the component, of the first of each."""

    values: Any
    indices: Any


class Slices:
    """Values, and the dims that are reduced: the `dense` ones, or the dim `along`, which `offsets` divide.

    A reduced tensor keeps its dims, with size 1 in the `dense` ones, and $B$ in `along`.
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
        """A constant per slice near its largest entries; finite, even for an empty slice."""
        x = x.detach()
        if self.along is None and not x.numel():
            return x.sum(self.dense, keepdim=True)
        m = self.amax(x)
        return torch.where(m.isfinite(), m, 0)

    def expand(self, reduced: Tensor) -> Tensor:
        """A reduced tensor, repeated at each entry of its slice; dense dims broadcast automatically."""
        if self.along is None:
            return reduced
        inexact = reduced.is_floating_point() or reduced.is_complex()
        repeat = repeated if inexact else _nested_sum_backward.reference
        return repeat(reduced, self.offsets, self.values.shape[self.along], self.along)

    def counts(self) -> Tensor | int:
        """The number of entries in each slice."""
        if self.along is None:
            return math.prod(self.values.shape[d] for d in self.dense)
        return self._in_place(self.offsets.diff())

    def positions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The position of each entry of $x$ along `along`, and the position where its slice begins."""
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


def one_dim(x: Ragged, dim: int) -> int:
    found = x.wrapped(dim)
    if found == 0:
        raise ValueError(f"dim: expected a dim of the components, got {dim}, the batch")
    return found


def reduce(x: Ragged, dim: Dims, keepdim: bool, function: Callable[[Slices], Any]) -> Any:
    """Apply ``function``, which reduces slices, and give its result (or results) the nested shape.

    With ``dim`` None, positions that belong to no component are counted, as in PyTorch's reductions.
    """
    dims = _dims(x, dim)
    if dims[0] == 0 and dim is not None:
        _ = x.offsets  # raises for a buffer with holes; the call is repeated without them
    if x.sizes is not None and dims[0] != 0:
        if len(dims) == x.dim() - 1:
            x, dims, kept = Ragged(x.values, x.offsets, (x.shape[0], None)), (1,), len(dims)
            found = reduce(x, 1, False, function)
            return _each(found, lambda r: r.reshape(-1, *[1] * kept)) if keepdim else found
        if len(dims) > 1:
            raise ValueError(f"dim: with several ragged dims, expected one component dim or all of them, got {dim}")
        lines = Lines(x, dims[0])
        offsets, rebuilt = lines.reduced(keepdim)
        return _each(function(Slices(lines.values, (), 0, offsets)), rebuilt)
    packed = x.packed_dim
    if dims[0] == 0 or packed + 1 not in dims:
        # if the batch is reduced too, the ragged dim of the buffer is reduced as a dense one
        dense = range(x.values.dim()) if dims[0] == 0 and x.sizes is not None else [d - 1 for d in dims if d]
        return _each(function(Slices(x.values, dense)), lambda r: _dense_result(x, r, dims, keepdim))
    dense = [d - 1 for d in dims if d != packed + 1]
    return _each(function(_joined(x, packed, dense)), lambda r: _batch_result(r, packed, dense, keepdim))


def _each(found: Any, function: Callable[[Tensor], Any]) -> Any:
    return Extremum(*map(function, found)) if isinstance(found, tuple) else function(found)


def _joined(x: Ragged, packed: int, dense: Sequence[int]) -> Slices:
    """The slices with the dense dims flattened into the ragged one, so that one dim is reduced."""
    if not dense:
        return Slices(x.values, (), packed, x.offsets)
    at = packed - len([d for d in dense if d < packed])
    values = x.values.movedim((packed, *dense), tuple(range(at, at + len(dense) + 1)))
    size = math.prod(x.values.shape[d] for d in dense)
    return Slices(values.flatten(at, at + len(dense)), (), at, x.offsets.long() * size)


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


def map_along(
    x: Ragged, dim: int, dense: Callable[[Tensor, int], Tensor], ragged: Callable[[Slices], Tensor]
) -> Ragged:
    """A function along one dim of the components that keeps their sizes."""
    dim = one_dim(x, dim)
    if x.sizes is not None:
        lines = Lines(x, dim)
        return x.like(ragged(Slices(lines.values, (), 0, lines.offsets())).index_select(0, lines.back))
    if dim - 1 != x.packed_dim:
        return x.like(dense(x.values, dim - 1))
    return x.like(ragged(Slices(x.values, (), dim - 1, x.offsets)))


def is_inexact(x: Ragged) -> bool:
    return x.values.is_floating_point() or x.values.is_complex()


def require_inexact(x: Ragged) -> None:
    if not is_inexact(x):
        raise TypeError(f"x: expected floating point or complex values, got {x.values.dtype}")


def scan(s: Slices, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor], neutral: int) -> Tensor:
    """Each position combined with all before it in its slice, in $log_2(T)$ passes that only multiply and add."""
    dim = s.packed
    here, start = s.positions(x)
    step = 1
    while step < x.shape[dim]:
        x = combine(x, torch.where(here - start >= step, x.roll(step, dim), neutral))
        step *= 2
    return x
