"""`torch.vmap` over the directions of a space, for tensors that may be jets of an enclosing space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .examples import with_dim, without_dim
from .rows import densified
from .tensor import is_jet, transforms_seen

__all__ = ["each_direction", "leaves", "rebuilt"]


def each_direction(function: Callable[..., Any], *tensors: Any) -> list[Any]:
    """``function(*tensors)``, a list of tensors, mapped over the first dimension of ``tensors``; None stays None."""
    parts: list[Any] = []
    dims: list[int] = []
    specs = [_take(x, 0, parts, dims, without_dim) for x in tensors]
    results: list[Any] = []

    def one(*given: Any) -> Any:
        found: list[Any] = []
        outer: list[int] = []
        if torch.compiler.is_dynamo_compiling():
            ys = function(*[_build(s, given) for s in specs])
        else:
            with transforms_seen():
                ys = function(*[_build(s, given) for s in specs])
        results[:] = [_take(y, 0, found, outer, with_dim) for y in ys]
        results.append(outer)
        return tuple(found)

    found = torch.vmap(one, tuple(dims))(*parts)
    outer = results.pop()
    return [_build(s, [y.movedim(0, d) if d else y for y, d in zip(found, outer)]) for s in results]


def _take(x: Any, dim: int, parts: list[Any], dims: list[int], examples: Callable[[Any, int], Any]) -> Any:
    """The parts that rebuild ``x``: its tensors are appended, with the place of the mapped dimension in each.

    ``examples`` computes those of a jet on the other side.
    """
    if x is None:
        return None
    if not is_jet(x):
        parts.append(x)
        dims.append(dim)
        return len(parts) - 1
    x = densified(x)
    space = x.space
    collapsed = [space.directions is None or k == space.order for k in range(1, space.order + 1)]
    terms = [_take(t, dim if c else dim + 1, parts, dims, examples) for t, c in zip(x.terms, collapsed)]
    return (space, _take(x.primal, dim, parts, dims, examples), terms, examples(x.examples, dim))


def _build(spec: Any, parts: Sequence[Any]) -> Any:
    if spec is None:
        return None
    if isinstance(spec, int):
        return parts[spec]
    space, primal, terms, examples = spec
    found = space.jet([_build(primal, parts), *[_build(t, parts) for t in terms]])
    found.examples = examples
    return found


def leaves(x: Any) -> list[Any]:
    """The elements of nested lists."""
    return [leaf for v in x for leaf in leaves(v)] if isinstance(x, (list, tuple)) else [x]


def rebuilt(x: Any, elements: Any) -> Any:
    """Nested lists like ``x``, with the elements of an iterator."""
    return [rebuilt(v, elements) for v in x] if isinstance(x, (list, tuple)) else next(elements)
