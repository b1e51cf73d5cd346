"""Computes products with the derivative in several directions at once, and reads its entries from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.internals import transforms_in_dual_level

__all__ = ["Compression", "backward_product", "chunk_for", "forward_product"]

_BUDGET = 2**28  # bytes for the directions of one chunk
Product = Callable[[Tensor], Tensor]


def chunk_for(colors: int, bytes_of_one: int, given: int | None) -> int:
    """How many directions are evaluated at once."""
    return max(1, min(colors, given if given is not None else _BUDGET // max(bytes_of_one, 1)))


def forward_product(function: Callable[[Tensor], Tensor], x: Tensor, factor: complex = 1) -> Product:
    """Products of the Jacobian with ``factor`` times a direction, by jvps."""

    def product(v: Tensor) -> Tensor:
        found: Tensor = torch.func.jvp(function, (x,), (v if factor == 1 else factor * v,))[1]
        return found

    return product


def backward_product(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Product, Tensor]:
    """Products of real directions with the transposed Jacobian, by vjps, and the result of the function."""
    pair: Any = torch.func.vjp(function, x)

    def product(v: Tensor) -> Tensor:
        found: Tensor = pair[1](v)[0]
        return found.conj() if found.is_complex() else found

    return product, pair[0]


class Compression:
    """Directions that are sums of unit vectors of one color, and the places of the entries in the products with them.

    No more than one chunk of products exists at a time.

    Args:
        coloring: the color of each element of a direction.
        colors: the number of colors.
        chunk: how many products are computed at once.
        color: (nnz), the product that each entry is read from.
        place: (nnz), the place of each entry in that product.
        device: of the products.
    """

    def __init__(
        self, coloring: Tensor, colors: int, chunk: int, color: Tensor, place: Tensor, device: torch.device
    ) -> None:
        self._coloring = coloring.to(device)
        self._chunks: list[tuple[int, int, Tensor, Tensor]] = []
        order = torch.argsort(color, stable=True)
        ends = torch.searchsorted(color[order], torch.arange(0, colors + chunk, chunk, device="cpu")).tolist()
        for start, a, b in zip(range(0, colors, chunk), ends, ends[1:]):
            chosen = order[a:b]
            if chunk >= colors:
                chosen = torch.arange(len(color), device="cpu")
            self._chunks.append(
                (start, min(start + chunk, colors), (color[chosen] - start).to(device), place[chosen].to(device))
            )
        self._inverse: Tensor | None = None
        if len(self._chunks) > 1:
            self._inverse = (
                torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device="cpu")).to(device)
            )

    def __call__(self, product: Product, like: Tensor) -> Tensor:
        """The entries (nnz).

        Args:
            product: linear in a tensor like ``like``.
            like: gives shape, dtype and device of the directions.
        """
        if torch.compiler.is_compiling():
            return self._entries(product, like)
        with transforms_in_dual_level():
            return self._entries(product, like)

    def _entries(self, product: Product, like: Tensor) -> Tensor:
        found = []
        for start, end, row, place in self._chunks:
            numbers = torch.arange(start, end, device=self._coloring.device)
            seeds = (numbers[:, None] == self._coloring).to(like.dtype).reshape(len(numbers), *like.shape)
            products = product(seeds[0])[None] if len(numbers) == 1 else torch.vmap(product)(seeds)
            found.append(products.reshape(len(numbers), -1)[row, place])
        if self._inverse is None:
            return found[0]
        return torch.cat(found)[self._inverse]
