"""scatter_reduce and index_reduce: sums, means, products and extrema of the entries that an index sends to the same place.

The derivative of a product needs the product of all entries of a group but one. It is computed by multiplications only, as
prefixes times suffixes within a group, so it is right for any number of zeros, in every order. The product divided by a factor
is not, and neither is the derivative of an expression that counts zeros.

Args:
    grad: cotangent of the result, the shape of ``self``.
    self: the initial entries, (*).
    dim: the dim along which the entries of src go.
    index: their places, integers; at most as large as ``src``.
    reduce: "sum", "prod", "mean", "amax" or "amin".
    include_self: whether ``self`` counts where entries are sent.
    result: as scatter_reduce returns it.

Note:
    Where not differentiable: at ties of extrema, where each entry has an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from ..shape.common import corner, in_corner


class _Scatter(NamedTuple):
    """The places that entries go to. Tensors have at least one dim, and those of the source have the sizes of the index."""

    dim: int
    places: Tensor  # the index
    counted: bool  # whether the result's own entries count everywhere

    def read(self, x: Tensor) -> Tensor:
        """For each entry, the entry of $x$ at its place."""
        return x.gather(self.dim, self.places)

    def add(self, x: Tensor, sent: Tensor) -> Tensor:
        """$x$ plus the sum of the entries that go to each place."""
        return x.scatter_add(self.dim, self.places, sent)

    def own(self, x: Tensor) -> Tensor:
        """$x$ where the result's own entries count, else zero."""
        return x if self.counted else x.scatter(self.dim, self.places, 0)

    def mean_of(self, x: Tensor) -> Tensor:
        """The number of entries that each mean is taken over; broadcasts with $x$."""
        return self._numbers(x, x.shape)

    def _numbers(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        dtype = self.counts(x)
        count = x.new_full(sizes, int(self.counted), dtype=dtype)
        count = self.add(count, torch.ones_like(self.places, dtype=dtype))
        return count if self.counted else count.clamp(min=1)

    def attained(self, self_: Tensor, src: Tensor, result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1 for the entries that attain the extremum, and how many there are at each place."""
        dtype = self.counts(self_)
        own, sent = self.own((self_ == result).to(dtype)), (src == self.read(result)).to(dtype)
        return own, sent, self.add(own, sent)

    def counts(self, x: Tensor) -> torch.dtype:
        """The dtype of numbers of entries: that of $x$, if it holds them exactly."""
        exact = not x.is_complex() and self.places.numel() < 1 / torch.finfo(x.dtype).eps
        return x.dtype if exact else torch.int64

    def for_each_entry(self, sizes: Sequence[int]) -> Tensor:
        """The index of each entry of a source of these sizes."""
        return self.places


class _Slices(_Scatter):
    """The same for an index of one dim, which has one integer for each slice of the source."""

    def read(self, x: Tensor) -> Tensor:
        return x.index_select(self.dim, self.places)

    def add(self, x: Tensor, sent: Tensor) -> Tensor:
        return x.index_add(self.dim, self.places, sent)

    def own(self, x: Tensor) -> Tensor:
        return x if self.counted else x.index_fill(self.dim, self.places, 0)

    def mean_of(self, x: Tensor) -> Tensor:
        sizes = [1] * x.dim()
        sizes[self.dim] = x.shape[self.dim]
        count = self._replace(dim=0)._numbers(x, [x.shape[self.dim]])
        return count.reshape(sizes)

    def for_each_entry(self, sizes: Sequence[int]) -> Tensor:
        shape = [1] * len(sizes)
        shape[self.dim] = -1
        return self.places.reshape(shape).expand(sizes)


def _scatter(self: Tensor, dim: int, index: Tensor, include_self: bool) -> _Scatter:
    return _Scatter(dim % max(self.dim(), 1), torch.atleast_1d(index), include_self)


@formula
def scatter_reduce_backward(
    grad: Tensor,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    include_self: bool,
    result: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cotangents of self and src, given that of scatter_reduce.

    For a product, the cotangent times the product of the other factors; for an extremum, shared equally among the entries
    that attain it.

    Args:
        src: the entries that are sent.

    Returns:
        The shapes of ``self`` and ``src``.

    References:
        ATen scatter_reduce_backward, whose product is a quotient.
    """
    if index.numel() == 0:
        return grad, torch.zeros_like(src)
    s = _scatter(self, dim, index, include_self)
    sent = corner(torch.atleast_1d(src), s.places.shape)
    of_self, of_src = _backward(s, grad, self, sent, reduce, include_self, result)
    return of_self, in_corner(of_src, src.shape)


def _backward(
    s: _Scatter, grad: Tensor, self: Tensor, sent: Tensor, reduce: str, include_self: bool, result: Tensor
) -> tuple[Tensor, Tensor]:
    """Cotangents of self and of the entries that are sent, which have a dim."""
    g, x = torch.atleast_1d(grad), torch.atleast_1d(self)
    if reduce == "sum":
        of_self, of_src = s.own(g), s.read(g)
    elif reduce == "mean":
        g = g / s.mean_of(g)
        of_self, of_src = s.own(g), s.read(g)
    elif reduce == "prod":
        product, others = scatter_prod_factors(sent, s.dim, s.for_each_entry(sent.shape), x.shape)
        of_self = g * product.conj() if include_self else s.own(g)
        of_src = s.read(g * x.conj() if include_self else g) * others.conj()
    else:
        own_attains, sent_attains, count = s.attained(x, sent, torch.atleast_1d(result))
        g = g / count
        of_self, of_src = g * own_attains, s.read(g) * sent_attains
    return of_self if self.dim() else of_self.reshape(()), of_src


@formula
def scatter_reduce_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    dim: int,
    index: Tensor,
    src_p: Tensor,
    src_t: Tensor | None,
    reduce: str,
    include_self: bool,
    result: Tensor,
) -> Tensor:
    """Tangent of scatter_reduce.

    Args:
        self_p: the initial entries, (*).
        src_p: the entries that are sent.
        self_t, src_t: tangents; None for zero.

    Returns:
        The shape of ``self_p``.

    References:
        ATen scatter_reduce_jvp, which has no product.
    """
    dx = torch.zeros_like(self_p) if self_t is None else self_t
    if index.numel() == 0:
        return dx
    s = _scatter(self_p, dim, index, include_self)
    dsent = torch.zeros_like(src_p) if src_t is None else src_t
    sent, dsent = (corner(torch.atleast_1d(t), s.places.shape) for t in (src_p, dsent))
    return _jvp(s, self_p, dx, sent, dsent, reduce, include_self, result)


def _jvp(
    s: _Scatter,
    self: Tensor,
    dx: Tensor,
    sent: Tensor,
    dsent: Tensor,
    reduce: str,
    include_self: bool,
    result: Tensor,
) -> Tensor:
    """The tangent, given those of self and of the entries that are sent, which have a dim."""
    dx, x = torch.atleast_1d(dx), torch.atleast_1d(self)
    if reduce == "sum":
        found = s.add(s.own(dx), dsent)
    elif reduce == "mean":
        found = s.add(s.own(dx), dsent) / s.mean_of(dx)
    elif reduce == "prod":
        product, others = scatter_prod_factors(sent, s.dim, s.for_each_entry(sent.shape), x.shape)
        found = dx * product if include_self else s.own(dx)
        sent_t = others * dsent * s.read(x) if include_self else others * dsent
        found = s.add(found, sent_t)
    else:
        own_attains, sent_attains, count = s.attained(x, sent, torch.atleast_1d(result))
        found = s.add(dx * own_attains, dsent * sent_attains) / count
    return found.reshape(self.shape)


def _slices(self: Tensor, dim: int, index: Tensor, include_self: bool) -> _Slices:
    return _Slices(dim % max(self.dim(), 1), torch.atleast_1d(index), include_self)


@formula
def index_reduce_backward(
    grad: Tensor,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    include_self: bool,
    result: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cotangents of self and source, given that of index_reduce: those of scatter_reduce with the index of each slice.

    Args:
        index: one integer for each slice of the source.
        source: the entries that are sent.

    Returns:
        The shapes of ``self`` and ``source``.
    """
    if source.numel() == 0:
        return grad, torch.zeros_like(source)
    s, sent = _slices(self, dim, index, include_self), torch.atleast_1d(source)
    of_self, of_source = _backward(s, grad, self, sent, reduce, include_self, result)
    return of_self, of_source if source.dim() else of_source.reshape(())


@formula
def index_reduce_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    dim: int,
    index: Tensor,
    source_p: Tensor,
    source_t: Tensor | None,
    reduce: str,
    include_self: bool,
    result: Tensor,
) -> Tensor:
    """Tangent of index_reduce.

    Args:
        self_p: the initial entries, (*).
        index: one integer for each slice of the source.
        source_p: the entries that are sent.
        self_t, source_t: tangents; None for zero.

    Returns:
        The shape of ``self_p``.

    References:
        As scatter_reduce_jvp; ATen has none.
    """
    dx = torch.zeros_like(self_p) if self_t is None else self_t
    if source_p.numel() == 0:
        return dx
    dsent = torch.zeros_like(source_p) if source_t is None else source_t
    sent, dsent = torch.atleast_1d(source_p), torch.atleast_1d(dsent)
    return _jvp(_slices(self_p, dim, index, include_self), self_p, dx, sent, dsent, reduce, include_self, result)


# -- products over groups, and of all entries of a group but one -------------------------------------------------------


@formula
def scatter_prod_factors(src: Tensor, dim: int, index: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Products of the entries that an index sends to each place, and for each entry the product of the others there.

    Args:
        src: the entries.
        dim: the dim along which they are sent, not negative.
        index: their places, the shape of ``src``; none is negative.
        sizes: the sizes of the target, at least those of the index in dims other than ``dim``.

    Returns:
        The products, of shape ``sizes``, 1 where nothing is sent; and those of the others, of the shape of ``src``.

    References:
        Prefixes by doubling: Hillis, Steele, Data parallel algorithms, doi:10.1145/7902.7903.
    """
    places, order = index.sort(dim=dim, stable=True)
    x = src.gather(dim, order)
    before = _prefixes(x, places, dim)
    after = _prefixes(x.flip(dim), places.flip(dim), dim).flip(dim)
    last = torch.cat([places.diff(dim=dim) != 0, places.narrow(dim, 0, 1) >= 0], dim)
    totals = src.new_zeros(sizes).scatter_add(dim, places, torch.where(last, before * x, 0))
    reached = torch.zeros(sizes, dtype=torch.bool, device=src.device).scatter(dim, index, True)
    return torch.where(reached, totals, 1), torch.zeros_like(x).scatter(dim, order, before * after)


def _prefixes(x: Tensor, places: Tensor, dim: int) -> Tensor:
    """For each entry, the product of the entries before it that go to the same place. These are adjacent."""
    product, step = _moved(x, places, dim, 1), 1
    while step < x.shape[dim] - 1:  # each product has the last `step` entries
        product, step = product * _moved(product, places, dim, step), 2 * step
    return product


def _moved(x: Tensor, places: Tensor, dim: int, step: int) -> Tensor:
    """The entry ``step`` places before each entry, or 1 if that goes to another place."""
    rest = x.shape[dim] - step
    same = places.narrow(dim, step, rest) == places.narrow(dim, 0, rest)
    ones = torch.ones_like(x.narrow(dim, 0, step))
    return torch.cat([ones, torch.where(same, x.narrow(dim, 0, rest), 1)], dim)


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::scatter_reduce.two",
    vjp={("self", "src"): scatter_reduce_backward},
    jvp={"result": scatter_reduce_jvp},
    improves=("values", "missing"),
    source="ATen scatter_reduce_backward, scatter_reduce_jvp; products by prefixes and suffixes",
)
rule(
    "aten::index_reduce",
    vjp={("self", "source"): index_reduce_backward},
    jvp={"result": index_reduce_jvp},
    improves=("values", "missing"),
    source="ATen index_reduce_backward; products by prefixes and suffixes",
)
