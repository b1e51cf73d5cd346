"""Products over the groups that an index makes, and of all entries of a group but one.

Each is made of multiplications alone, prefixes times suffixes within a group, so that any number of zeros is right in
every order: a quotient of the product by its factor is not, and neither is a count of the zeros when it is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

__all__ = ["scatter_prod_factors"]


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

    Note:
        Where not differentiable: nowhere; they are polynomials.

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
