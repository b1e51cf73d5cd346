"""scatter_reduce and index_reduce: sums, means, products and extrema of the entries that an index sends to the same place.

The derivative of a product needs the product of all entries of a group but one. It is made of multiplications alone,
prefixes times suffixes within a group, so that any number of zeros is right in every order: a quotient of the product by
its factor is not, and neither is a count of the zeros when it is differentiated.

Args:
    grad: cotangent of the result, the shape of ``self``.
    self: what is there before, (*).
    dim: along which the entries of src go.
    index: where to, integers; at most as large as ``src``.
    reduce: "sum", "prod", "mean", "amax" or "amin".
    include_self: whether ``self`` counts where something is sent.
    result: as scatter_reduce returns it.

Note:
    Where not differentiable: at ties of extrema, where each entry has an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, formula, rule

from ..shape.common import corner, in_corner


class _Scatter(NamedTuple):
    """Where entries go: tensors with at least one dim, those of the source with the sizes of the index."""

    dim: int
    places: Tensor  # the index
    reached: Tensor  # of the shape of the result: whether an entry goes there
    counted: bool  # whether the entries of the result's own count everywhere

    def add(self, x: Tensor) -> Tensor:
        """Sums of what goes to each place."""
        return x.new_zeros(self.reached.shape).scatter_add(self.dim, self.places, x)

    def read(self, x: Tensor) -> Tensor:
        """For each entry, what is at its place."""
        return x.gather(self.dim, self.places)

    def own(self, x: Tensor) -> Tensor:
        """$x$ where the entries of the result's own count, else zero."""
        return x if self.counted else x.masked_fill(self.reached, 0)

    def mean_of(self) -> Tensor:
        """How many entries the mean at each place is of."""
        count = self.add(torch.ones_like(self.places, dtype=torch.int64))
        return (count + 1 if self.counted else count).clamp(min=1)

    def attained(self, self_: Tensor, src: Tensor, result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which entries attain the extremum, and how many there are at each place."""
        own, sent = self.own(self_ == result), src == self.read(result)
        return own, sent, own.long() + self.add(sent.long())


def _scatter(self: Tensor, dim: int, index: Tensor, include_self: bool) -> _Scatter:
    dim, index = dim % max(self.dim(), 1), torch.atleast_1d(index)
    reached = torch.zeros_like(torch.atleast_1d(self), dtype=torch.bool).scatter(dim, index, True)
    return _Scatter(dim, index, reached, include_self)


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
        src: what is sent.

    Returns:
        The shapes of ``self`` and ``src``.

    References:
        ATen scatter_reduce_backward, whose product is a quotient.
    """
    if index.numel() == 0:
        return grad, torch.zeros_like(src)
    s = _scatter(self, dim, index, include_self)
    g, x, sent = (torch.atleast_1d(t) for t in (grad, self, src))
    sent = corner(sent, s.places.shape)
    if reduce == "sum":
        of_self, of_src = s.own(g), s.read(g)
    elif reduce == "mean":
        g = g / s.mean_of()
        of_self, of_src = s.own(g), s.read(g)
    elif reduce == "prod":
        product, others = scatter_prod_factors(sent, s.dim, s.places, x.shape)
        of_self = g * product.conj() if include_self else s.own(g)
        of_src = s.read(g * x.conj() if include_self else g) * others.conj()
    else:
        own_attains, sent_attains, count = s.attained(x, sent, torch.atleast_1d(result))
        g = g / count
        of_self, of_src = g * own_attains, s.read(g) * sent_attains
    return of_self.reshape(self.shape), in_corner(of_src, src.shape)


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
        self_p: what is there before, (*).
        src_p: what is sent.
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
    dx, x, sent, dsent = (torch.atleast_1d(t) for t in (dx, self_p, src_p, dsent))
    sent, dsent = (corner(t, s.places.shape) for t in (sent, dsent))
    if reduce == "sum":
        found = s.own(dx) + s.add(dsent)
    elif reduce == "mean":
        found = (s.own(dx) + s.add(dsent)) / s.mean_of()
    elif reduce == "prod":
        product, others = scatter_prod_factors(sent, s.dim, s.places, x.shape)
        found = dx * product if include_self else s.own(dx)
        found = found + s.add(others * dsent * s.read(x) if include_self else others * dsent)
    else:
        own_attains, sent_attains, count = s.attained(x, sent, torch.atleast_1d(result))
        found = (dx * own_attains + s.add(dsent * sent_attains)) / count
    return found.reshape(self_p.shape)


def _expanded(dim: int, index: Tensor, source: Tensor) -> Tensor:
    """An index for each slice as one for each entry."""
    sizes = [1] * source.dim()
    if sizes:
        sizes[dim] = -1
    return index.reshape(sizes).expand(source.shape)


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
        source: what is sent.

    Returns:
        The shapes of ``self`` and ``source``.
    """
    index = _expanded(dim, index, source)
    return scatter_reduce_backward(grad, self, dim, index, source, reduce, include_self, result)


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
        self_p: what is there before, (*).
        index: one integer for each slice of the source.
        source_p: what is sent.
        self_t, source_t: tangents; None for zero.

    Returns:
        The shape of ``self_p``.

    References:
        As scatter_reduce_jvp; ATen has none.
    """
    index = _expanded(dim, index, source_p)
    return scatter_reduce_jvp(self_p, self_t, dim, index, source_p, source_t, reduce, include_self, result)


def _plain(self: Tensor, reduce: str, include_self: bool) -> bool:
    """Whether PyTorch is right in reverse mode.

    It is not for complex numbers, at several zeros, and where an entry that does not count is the extremum.
    """
    return not self.is_complex() and (reduce in ("sum", "mean") or reduce in ("amax", "amin") and include_self)


# -- products over groups, and of all entries of a group but one -------------------------------------------------------


@formula
def scatter_prod_factors(src: Tensor, dim: int, index: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Products of the entries that an index sends to each place, and for each entry the product of the others there.

    Args:
        src: the entries.
        dim: along which they are sent, not negative.
        index: the shape of ``src``, where to; of no entry below zero.
        sizes: of where they are sent to, at least those of the index in other dims than ``dim``.

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
    """Of each entry, the product of those before it that go to the same place, which stand side by side."""
    product, step = _moved(x, places, dim, 1), 1
    while step < x.shape[dim] - 1:  # each product has the last `step` entries
        product, step = product * _moved(product, places, dim, step), 2 * step
    return product


def _moved(x: Tensor, places: Tensor, dim: int, step: int) -> Tensor:
    """The entry so many steps before, 1 where that goes to another place."""
    rest = x.shape[dim] - step
    same = places.narrow(dim, step, rest) == places.narrow(dim, 0, rest)
    ones = torch.ones_like(x.narrow(dim, 0, step))
    return torch.cat([ones, torch.where(same, x.narrow(dim, 0, rest), 1)], dim)


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::scatter_reduce.two",
    vjp={("self", "src"): scatter_reduce_backward},
    jvp={"result": scatter_reduce_jvp},
    defer_to_stock=ByMetadata(
        lambda self, dim, index, src, reduce, include_self: (
            index.shape == src.shape and _plain(self, reduce, include_self)
        )
    ),
    improves=("values", "missing"),
    source="ATen scatter_reduce_backward, scatter_reduce_jvp; products by prefixes and suffixes",
)
rule(
    "aten::index_reduce",
    vjp={("self", "source"): index_reduce_backward},
    jvp={"result": index_reduce_jvp},
    defer_to_stock=ByMetadata(
        lambda self, dim, index, source, reduce, include_self: _plain(self, reduce, include_self)
    ),
    improves=("values", "missing"),
    source="ATen index_reduce_backward; products by prefixes and suffixes",
)
