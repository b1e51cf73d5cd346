"""Colors of the columns of a pattern, such that columns of one color can share a product with the matrix."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked
from . import greedy
from .pattern import Pattern, pattern_of

__all__ = ["Kind", "Ordering", "color", "colored"]

Kind = Literal["columns", "rows", "star", "acyclic"]
Ordering = Literal["auto", "natural", "largest_first", "smallest_last", "incidence", "random"]
_BY_DEGREE = ("largest_first", "smallest_last", "incidence")


@checked
def color(pattern: object, kind: Kind = "columns", ordering: Ordering = "auto", seed: int = 0) -> Tensor:
    """The colors of the columns or rows of a matrix, by a greedy algorithm.

    Args:
        pattern: (m, n), the matrix or its pattern: a tensor, dense or sparse, or a sparse matrix of scipy.
        kind: "columns": columns of one color have no nonzero in the same row. "rows": the same for rows. "star": for a
            symmetric matrix, each nonzero can be read from the sums of the columns of each color. "acyclic": it can be
            computed from these by substitution.
        ordering: the order in which columns are colored; "auto" takes the best of four orderings.
        seed: of the random ordering.

    Returns:
        (n), or (m) for rows: int64, from 0 on.

    Raises:
        TypeError: ``pattern`` is not a matrix.
        ValueError: a name is unknown, or the pattern is not symmetric as required.

    References:
        Gebremedhin, Manne and Pothen, SIAM Review 47 (2005) 629, algorithm 3.2; Gebremedhin, Tarafdar, Manne and Pothen, SIAM
        J. Sci. Comput. 29 (2007) 1042, algorithms 3.1 and 4.1.
    """
    return colored(pattern_of(pattern, "pattern"), kind, ordering, seed)


def colored(pattern: Pattern, kind: Kind, ordering: Ordering = "auto", seed: int = 0) -> Tensor:
    """`color`, of a `Pattern`."""
    if kind in ("star", "acyclic") and not pattern.is_symmetric():
        raise ArgumentError(
            f"pattern: expected a symmetric pattern for {kind} coloring, got one of shape {pattern.shape}"
        )
    transposed = pattern.transposed()
    if kind in ("star", "acyclic"):
        off = pattern.without_diagonal()
        count, bound = pattern.shape[0], 0
        # each entry is a net with two vertices, so that the degree is that of the graph
        edges = off.upper_edges()
        graph = (*edges.transposed_rows(), *edges.rows())
    else:
        first, second = (transposed, pattern) if kind == "columns" else (pattern, transposed)
        count = first.shape[0]
        bound = int(second.counts().max()) if len(second.crow) > 1 else 0
        graph = (first.crow, first.col, second.crow, second.col)
    best: Tensor | None = None
    for name in ("natural", *_BY_DEGREE) if ordering == "auto" else (ordering,):
        order = _order(name, count, graph, seed)
        if kind == "star":
            found = greedy.star(pattern.crow, pattern.col, order)
        elif kind == "acyclic":
            found = greedy.acyclic(pattern.crow, pattern.col, order)
        else:
            found = greedy.distance2(*graph, order)
        if best is None or (count and int(found.max()) < int(best.max())):
            best = found
        if not count or int(best.max()) < bound:  # no coloring has fewer
            break
    assert best is not None
    return best


def _order(name: str, count: int, graph: tuple[Tensor, ...], seed: int) -> Tensor:
    if name == "natural":
        return torch.arange(count, device="cpu")
    if name == "random":
        generator = torch.Generator(device="cpu").manual_seed(seed)
        return torch.randperm(count, generator=generator, device="cpu")
    return greedy.degree_order(*graph, _BY_DEGREE.index(name))
