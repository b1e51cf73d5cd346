"""Block-diagonal Jacobians: jets whose entries depend on one row of the input each, such as one electron.

While rows are separate, they all share a few directions, like examples of a batch. `in_rows`
tracks the row of each entry; the first operator that mixes rows gets jets along the directions of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import operator, rules

from . import elementwise as jet_elementwise
from .scaled import Scaled, whole
from .tensor import Space, is_jet

__all__ = ["ELEMENTWISE", "RowSpace", "Rows", "densified", "in_rows"]


class Rows(NamedTuple):
    """The rows that the entries of a tensor belong to: entry i of a dimension to ``first + i // inner % number``.

    Attributes:
        dim: negative, so that broadcasting does not change it; irrelevant if there is only one row.
        inner: the number of consecutive entries of one row.
        first, number: the rows.
    """

    dim: int
    inner: int
    first: int
    number: int


class RowSpace(Space):
    """Jets of second order with block-diagonal Jacobians; each has an attribute ``rows``.

    Attributes:
        start: the rows of the argument.
        seeds: the Jacobian of the argument.
        basis: makes the Jacobian of the argument along the directions of all rows.
        apart: the space in which rules run on such jets, as for a batch.
        full: the space of jets along the directions of all rows, row by row.
    """

    def __init__(self, argument: Any, dim: int, seeds: Tensor, basis: Callable[[], Tensor]) -> None:
        directions = len(seeds)
        super().__init__(2, directions)
        self.start, self.seeds, self.basis = Rows(dim - argument.ndim, 1, 0, argument.shape[dim]), seeds, basis
        self.apart, self.full = Space(2, directions), Space(2, self.start.number * directions)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        def inside() -> Any:
            self.apart.level = self.full.level = self.level - 0.5  # a call with jets of both belongs to this space
            self.apart.memory = self.full.memory = self.memory
            self.full.batch_of = self.batch_of
            return function(*args)

        return super().run(inside)

    def has(self, x: Any) -> bool:
        return is_jet(x) and (x.space is self or x.space is self.full)

    def coefficients(self, x: Any) -> list[Any]:
        return self.full.coefficients(x) if is_jet(x) and x.space is self.full else super().coefficients(x)

    def jet(self, coefficients: Sequence[Any], rows: Rows | None = None) -> Any:
        """The jet of the argument, or of tensors with other rows."""
        found = super().jet(coefficients)
        found.rows = rows or self.start
        return found


def densified(x: Any) -> Any:
    """Turn a jet of a `RowSpace` into one along the directions of all rows; anything else is returned unchanged."""
    if not (is_jet(x) and isinstance(x.space, RowSpace)):
        return x
    space, (primal, jacobian, last), rows = x.space, x.space.factored(x), x.rows
    if jacobian is space.seeds:  # the argument itself, or an elementwise function of it: expanded along the batch
        jacobian = space.basis()
    elif isinstance(jacobian, Scaled) and jacobian.term is space.seeds:
        jacobian = Scaled(jacobian.factor, space.basis())
    elif jacobian is not None:
        jacobian = whole(jacobian)
        owners = torch.tensor([rows.first], device=primal.device)
        if rows.number > 1:
            owners = rows.first + torch.arange(primal.shape[rows.dim], device=primal.device) // rows.inner % rows.number
            owners = owners.reshape(-1, *[1] * (-1 - rows.dim))
        every = torch.arange(space.start.number, device=primal.device).reshape(-1, *[1] * (primal.ndim + 1))
        jacobian = torch.where(every == owners, jacobian, 0).flatten(0, 1)
    found = space.full.jet([primal, jacobian, last])
    found.examples = x.examples
    return found


def in_rows(space: RowSpace, name: str, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The rule of an operator: with separate rows if the operator keeps them separate."""
    if getattr(rule, "composed", False):
        return rule(space, *args, **kwargs)
    jets: list[Any] = []
    _each(lambda x: jets.append(x) if space.has(x) else None, (args, tuple(kwargs.values())))
    rows = _rows_after(space, name, jets, args, kwargs)
    if rows is None and not getattr(rule, "constant", False):
        return rule(space.full, *_each(densified, args), **{k: _each(densified, v) for k, v in kwargs.items()})
    moved = lambda x: space.apart.jet(space.factored(x)) if is_jet(x) and x.space is space else x  # noqa: E731
    found = rule(space.apart, *_each(moved, args), **{k: _each(moved, v) for k, v in kwargs.items()})
    if isinstance(rows, list):
        return [_tagged(space, x, r) for x, r in zip(found, rows)]
    return _each(lambda x: _tagged(space, x, rows), found)


def _each(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        found = [_each(function, v) for v in x]
        return found if isinstance(x, list) else tuple(found)
    return function(x)


def _tagged(space: RowSpace, x: Any, rows: Any) -> Any:
    if not (is_jet(x) and x.space is space.apart):
        return x
    return space.jet(space.apart.factored(x), rows) if x.lost is None else space.lost(x.primal, x.lost)


# -- the row of each entry of a result; None if an entry belongs to several
# ---------------------------------------------------


def _rows_after(space: RowSpace, name: str, jets: list[Any], args: Any, kwargs: Any) -> Any:
    if any(x.space is space.full for x in jets):
        return None
    if name in _JOINS:
        return _joined(space, args[0], args[1] if len(args) > 1 else 0, name == "aten::stack")
    if any(x.rows != jets[0].rows for x in jets):
        return None
    if jets[0].rows.number == 1 or name in ELEMENTWISE:
        return jets[0].rows
    if name in _VIEWS:
        return _VIEWS[name](args[0], *args[1:], **kwargs)
    if name in _PRODUCTS:
        return _product(space, _PRODUCTS[name], args)
    return _reduced(name, args, kwargs) if name in _REDUCTIONS else None


def _permuted(x: Any, dims: list[int]) -> Rows:
    return x.rows._replace(dim=[d % x.ndim for d in dims].index(x.rows.dim % x.ndim) - x.ndim)


def _transposed(x: Any, a: int = -2, b: int = -1) -> Rows:
    dims = list(range(x.ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(x, dims)


def _reshaped(name: str) -> Callable[..., Rows | None]:
    """In memory order, ``inner * size of the following dims`` consecutive elements belong to one row."""

    def rows(x: Any, *args: Any, **kwargs: Any) -> Rows | None:
        primal = x.primal.detach()
        shape = (primal.reshape(args[0]) if "view" in name else operator(name)(primal, *args)).shape
        if 0 in shape:
            return None
        sequence = x.rows.inner * math.prod(x.shape[x.ndim + x.rows.dim + 1 :])
        size = 1
        for dim in range(-1, -len(shape) - 1, -1):
            inner, rest = divmod(sequence, size)
            if rest == 0 and shape[dim] % (inner * x.rows.number) == 0:
                return x.rows._replace(dim=dim, inner=inner)
            size *= shape[dim]
        return None

    return rows


def _is_split(x: Any, dim: int) -> bool:
    """Whether ``dim`` is the dimension of the rows, with one entry each."""
    return dim % x.ndim == x.rows.dim % x.ndim and x.rows.inner == 1 and x.shape[dim] == x.rows.number


def _part(x: Any, dim: int, start: int, count: int) -> Rows | None:
    if dim % x.ndim != x.rows.dim % x.ndim:
        return x.rows
    return x.rows._replace(first=x.rows.first + start, number=count) if _is_split(x, dim) and count > 0 else None


def _sliced(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Rows | None:
    low, high, _ = slice(start, end).indices(x.shape[dim])
    return _part(x, dim, low, high - low) if step == 1 or dim % x.ndim != x.rows.dim % x.ndim else None


def _selected(x: Any, dim: int, index: int) -> Rows | None:
    found = _part(x, dim, index % x.shape[dim], 1)
    return found if found is None else found._replace(dim=_without(x, [dim]))


def _unbound(x: Any, dim: int = 0) -> list[Rows] | None:
    found = [_selected(x, dim, i) for i in range(x.shape[dim])]
    return None if any(f is None for f in found) else found  # type: ignore[return-value]


def _split(x: Any, sizes: Any, dim: int = 0) -> list[Rows] | None:
    size = x.shape[dim]
    sizes = [min(sizes, size - i) for i in range(0, size, sizes)] if isinstance(sizes, int) else sizes
    found = [_part(x, dim, sum(sizes[:i]), s) for i, s in enumerate(sizes)]
    return None if any(f is None for f in found) else found  # type: ignore[return-value]


def _without(x: Any, dims: list[int]) -> int:
    """The dimension of the rows after others are removed."""
    return x.rows.dim + sum(1 for d in dims if d % x.ndim > x.rows.dim % x.ndim)


def _joined(space: RowSpace, tensors: Any, dim: int, stacked: bool) -> Rows | None:
    """Joined along a dimension other than that of the rows, or rows in order."""
    jets = [x for x in tensors if space.has(x)]
    x = jets[0]
    ndim = x.ndim + stacked
    dim = dim % ndim - ndim
    if all(y.rows == x.rows for y in jets) and (x.rows.number == 1 or stacked or dim != x.rows.dim):
        return x.rows._replace(dim=x.rows.dim - (stacked and dim >= x.rows.dim))
    follow = all(b.rows.first == a.rows.first + a.rows.number for a, b in zip(jets, jets[1:]))
    apart = all(y.rows.number == 1 if stacked else y.shape[dim] == y.rows.number for y in jets)
    if len(jets) < len(tensors) or not follow or not apart or not (stacked or all(_along(y, dim) for y in jets)):
        return None
    return Rows(dim, 1, x.rows.first, sum(y.rows.number for y in jets))


def _along(x: Any, dim: int) -> bool:
    return x.rows.number == 1 or x.rows.dim == dim and x.rows.inner == 1


def _product(space: RowSpace, places: tuple[int, int], args: Any) -> Rows | None:
    """A matrix product: rows of the first, columns of the second, or matrices of a batch."""
    left, right = (space.has(args[i]) for i in places)
    if any(space.has(x) for i, x in enumerate(args) if i not in places):
        return None
    rows = args[places[0] if left else places[1]].rows
    apart = rows.dim < -2 or rows.dim == -2 and not right or rows.dim == -1 and not left
    return rows if apart else None


def _reduced(name: str, args: Any, kwargs: Any) -> Rows | None:
    signature = rules[name].signature
    values = dict(zip(signature.names, signature.bind(args, kwargs)))
    x, dims = values["self"], values["dim"]
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or any(d % x.ndim == x.rows.dim % x.ndim for d in dims):
        return None
    return x.rows if values.get("keepdim", True) else x.rows._replace(dim=_without(x, dims))


ELEMENTWISE = frozenset(jet_elementwise.RULES) | frozenset(
    f"aten::{name}"
    for name in (
        "threshold leaky_relu hardtanh hardshrink softshrink hardsigmoid clamp clamp.Tensor clamp_min clamp_max "
        "clamp_min.Tensor clamp_max.Tensor maximum minimum fmax fmin sign masked_fill.Scalar masked_fill.Tensor copysign.Scalar "
        "mul.Tensor alias clone lift_fresh _to_copy expand hardswish celu selu xlogy special_xlog1py frac real imag sinc"
    ).split()
)
_VIEWS: dict[str, Callable[..., Any]] = {
    "aten::permute": _permuted,
    "aten::transpose.int": _transposed,
    "aten::t": _transposed,
    "aten::slice.Tensor": _sliced,
    "aten::select.int": _selected,
    "aten::unbind.int": _unbound,
    "aten::split.Tensor": _split,
    "aten::split_with_sizes": _split,
    **{
        f"aten::{name}": _reshaped(f"aten::{name}")
        for name in ("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims")
    },
}
_JOINS = ("aten::cat", "aten::stack")
_PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "sum.dim_IntList mean.dim amax amin prod.dim_int linalg_vector_norm max.dim min.dim cumsum cumprod index_select"
    ).split()
)
