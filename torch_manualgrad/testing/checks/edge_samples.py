"""Calls at the edge, made from an ordinary one: other values, other shapes, other layouts of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comparison.problem import Problem
from ..inputs import tree
from ..numerics.arithmetic import magnitude

#: The number of inputs that are moved to an edge one by one, before all inputs together.
INPUTS = 2

Change = Callable[[Tensor], Tensor | None]


class EdgeSample(NamedTuple):
    """The leaves of the arguments at an edge, and whether to check second orders there."""

    label: str
    leaves: list[Any]
    second: bool


def _by_part(change: Callable[[Tensor], Tensor]) -> Change:
    """Apply the change to real and imaginary parts."""

    def apply(x: Tensor) -> Tensor:
        return torch.view_as_complex(change(torch.view_as_real(x.resolve_conj()))) if x.is_complex() else change(x)

    return apply


def _with(start: int, step: int, value: float) -> Change:
    """Replace some entries."""

    def change(x: Tensor) -> Tensor | None:
        if start >= x.numel():
            return None
        flat = x.clone(memory_format=torch.contiguous_format).reshape(-1)
        flat[start::step] = value
        return flat.reshape(x.shape)

    return change


def _opposite(x: Tensor) -> Tensor | None:
    """Of real numbers that all have one sign."""
    return -x if not x.is_complex() and x.numel() and bool((x > 0).all() | (x < 0).all()) else None


def _some_zeros(x: Tensor) -> Tensor | None:
    some = _with(0, 3, 0.0)(x)
    return None if some is None or x.numel() < 2 else _with(1, 3, -0.0)(some)


def _equal_pairs(x: Tensor) -> Tensor | None:
    flat = x.clone(memory_format=torch.contiguous_format).reshape(-1)
    if x.numel() < 2:
        return None
    flat[1::2] = flat[: x.numel() - 1 : 2]
    return flat.reshape(x.shape)


def _equal_entries(x: Tensor) -> Tensor | None:
    return x.reshape(-1)[:1].expand(x.numel()).reshape(x.shape).clone() if x.numel() > 1 else None


def _repeated_rows(x: Tensor) -> Tensor | None:
    return x[..., :1, :].expand_as(x).clone() if x.dim() > 1 and x.shape[-2] > 1 else None


def _rank_one(x: Tensor) -> Tensor | None:
    return x[..., :, :1] * x[..., :1, :] if x.dim() > 1 and min(x.shape[-2:]) > 1 else None


def _scaled(to: float) -> Change:
    """Scale to a magnitude."""
    return lambda x: x / magnitude(x) * to


def values(dtype: torch.dtype) -> dict[str, Change]:
    """Changes of values; the extreme values are those of the narrowest dtype of inputs and outputs."""
    limits = torch.finfo(dtype)
    return {
        "opposite signs": _opposite,
        "zeros": torch.zeros_like,
        "some zeros": _some_zeros,
        "equal entries": _equal_entries,
        "equal pairs": _equal_pairs,
        "repeated rows": _repeated_rows,
        "rank one": _rank_one,
        "integers": _by_part(lambda x: (2 * x / magnitude(x)).round()),
        "tiny values": _scaled(max(1e-30, limits.tiny)),
        "huge values": _scaled(min(1e30, limits.max / 16)),
        "subnormal values": _scaled(limits.tiny / 8),
        "values near the largest": _scaled(limits.max / 1024),
        "one inf": _with(0, 2**62, torch.inf),
        "one -inf": _with(0, 2**62, -torch.inf),
        "one nan": _with(0, 2**62, torch.nan),
    }


#: The edges at which second orders are judged, and the edges that are tried for all inputs together.
TWICE = ("opposite signs", "zeros", "some zeros", "equal entries", "integers")
TOGETHER = ("zeros", "some zeros", "equal entries", "integers", "tiny values", "huge values")


def _strided(x: Tensor) -> Tensor | None:
    return torch.stack([x, torch.full_like(x, 77)], -1)[..., 0] if x.numel() > 1 else None


def _expanded(dim: int) -> Change:
    return lambda x: x.narrow(dim, 0, 1).expand_as(x) if x.dim() and x.shape[dim] > 1 else None


def _conj_bit(x: Tensor) -> Tensor | None:
    return x.resolve_conj().conj_physical().conj() if x.is_complex() else None


def _neg_bit(x: Tensor) -> Tensor | None:
    wide = x.dtype in (torch.float32, torch.float64)
    return torch.complex(torch.zeros_like(x), -x).conj().imag if wide else None


BROADCAST = "to broadcast"
STRIDED = "every second element of a storage"
#: Other layouts of the same values, or of values that allow the layout. They are the last edges, `STRIDED` first.
LAYOUTS: dict[str, Change] = {
    STRIDED: _strided,
    "expanded along the first dimension": _expanded(0),
    "expanded along the last dimension": _expanded(-1),
    "the conj bit": _conj_bit,
    "the neg bit": _neg_bit,
}


def edge_samples(p: Problem) -> Iterator[EdgeSample]:
    """Samples that the function may reject in part."""
    usable = [i for i in p.index if p.leaves[i].layout == torch.strided and not p.leaves[i].is_nested]
    changes = values(p.dtype)
    for name, change in (changes | _bounds(p)).items():
        for i in usable[:INPUTS]:
            yield from _changed(p, [i], change, f"{name} of {p.paths[i]}", name in TWICE)
    if len(usable) > 1:
        for name in TOGETHER:
            yield from _changed(p, usable, changes[name], f"{name} of all inputs", name in TWICE)
        yield from _equal_inputs(p, usable)
        yield from _broadcast(p, usable)
    yield from _resized(p)
    for name, change in LAYOUTS.items():
        yield from _changed(p, usable, change, f"inputs with {name}" if "bit" in name else f"inputs {name}")


def _changed(p: Problem, which: list[int], change: Change, label: str, second: bool = False) -> Iterator[EdgeSample]:
    leaves = list(p.leaves)
    changed = False
    for i in which:
        other = change(leaves[i])
        if other is not None:
            leaves[i], changed = other, True
    if changed:
        yield EdgeSample(label, leaves, second)


def _bounds(p: Problem) -> dict[str, Change]:
    """Entries that are equal to a number among the arguments: a bound, a threshold."""
    numbers = [x for x in p.leaves if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return {f"entries equal to {x:g}": _with(0, 2, x) for x in dict.fromkeys(numbers[:4]) if abs(x) < 1e4}


def _equal_inputs(p: Problem, usable: list[int]) -> Iterator[EdgeSample]:
    first = usable[0]
    for i in usable[1:]:
        a, b = p.leaves[first], p.leaves[i]
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            yield from _changed(p, [i], partial(_clone_of, a), f"{p.paths[i]} equal to {p.paths[first]}")


def _clone_of(a: Tensor, _: Tensor) -> Tensor:
    return a.clone()


def _broadcast(p: Problem, usable: list[int]) -> Iterator[EdgeSample]:
    shapes: dict[str, tuple[int, Change]] = {
        "one row": (0, lambda x: x[:1].clone()),
        "one column": (-1, lambda x: x[..., :1].clone()),
        "no first dimension": (0, lambda x: x[0].clone()),
    }
    for name, (dim, change) in shapes.items():
        for i in usable[:INPUTS]:
            x = p.leaves[i]
            if x.dim() > (dim == -1) and x.shape[dim] in _free_sizes(p):
                yield from _changed(p, [i], change, f"{name} of {p.paths[i]}, {BROADCAST}")


def _resized(p: Problem) -> Iterator[EdgeSample]:
    """A dimension with no element and with one, wherever a tensor has that size."""
    dense = [i for i, x in enumerate(p.leaves) if isinstance(x, Tensor) and not tree.is_sparse(x) and not x.is_nested]
    sizes = _free_sizes(p)
    for n in sizes[:3]:
        for size in (0, 1):

            def change(x: Tensor, n: int = n, size: int = size) -> Tensor | None:
                keep = tuple(slice(0, size) if m == n else slice(None) for m in x.shape)
                return x[keep].clone() if n in x.shape else None

            yield from _changed(p, dense, change, f"size {size} instead of {n}")
    if sizes and all(n in (1, *sizes) for i in dense for n in p.leaves[i].shape):
        yield from _changed(p, dense, lambda x: x[(slice(0, 1),) * x.dim()].clone(), "one element")
        yield from _changed(p, dense, lambda x: x[(0,) * x.dim()].clone(), "no dimensions")


def _free_sizes(p: Problem) -> list[int]:
    """The sizes that are given by the shapes of the inputs alone.

    An index, or a number that is a size too, would point outside of a smaller tensor, which not every operator notices.
    """
    given = [x for x in p.leaves if isinstance(x, int)]
    if any(isinstance(x, Tensor) and not tree.is_differentiable(x) and x.dtype != torch.bool for x in p.leaves):
        return []
    sizes = (n for x in p.primals if x.layout == torch.strided and not x.is_nested for n in x.shape)
    return list(dict.fromkeys(n for n in sizes if n > 1 and n not in given))
