"""The levels that a thread sees, and the tangents of a tensor at them.

A value is a polynomial in one epsilon per level, each with square zero. Its coefficients form a tree: a tensor has a
tangent at each level, and the tangent at a level has tangents only at its outer levels. So the path to the coefficient
of a product of epsilons goes from the innermost level outwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.forward import hooks
from ...core.internals import (
    below_levels,
    nested_strides,
    on_this_thread,
    put_on_this_thread,
    storage_of,
    strided_nested,
)
from ...core.schema import is_differentiable
from .layout import Shadow, Shadows, copied, is_dense, unexpanded

__all__ = [
    "Level",
    "Levels",
    "add",
    "as_packing",
    "coefficient",
    "forget",
    "fresh",
    "give",
    "in_formula",
    "innermost",
    "is_inside",
    "opened",
    "outside",
    "packing",
    "plainly",
    "seeing",
    "tangent",
    "torch_unpacked",
    "unknown_as",
    "visible",
    "write",
]


class Level:
    """Storage of the tangents of one dual level.

    Attributes:
        shadows: the tangents.
        depth: 1 for an outermost level.
        is_open: False after its block.
    """

    def __init__(self) -> None:
        self.shadows = Shadows()
        self.depth = 0
        self.is_open = False
        self.all: tuple[Any, ...] = ()  # with its outer levels

    def __repr__(self) -> str:
        return f"<dual level of depth {self.depth}, {'open' if self.is_open else 'closed'}>"


Levels = Sequence[Level]  # the outermost first


class _State(NamedTuple):
    """The state of a thread: the levels visible to its own code, and those visible to operators now, in formulas."""

    open: tuple[Level, ...] = ()
    visible: tuple[Level, ...] = ()
    packing: bool = False  # a hook packs a saved tensor: it keeps the detached one


_NONE = _State()


def _state() -> _State:
    return on_this_thread() or _NONE


def visible() -> tuple[Level, ...]:
    """The levels that operators on this thread see now."""
    return _state().visible


def is_inside() -> bool:
    """Whether a level is open on this thread, or was where the backward pass began that this thread runs."""
    return bool(_state().open)


def in_formula() -> bool:
    """Whether this thread runs the formula of a rule, which hides the level of that rule."""
    return _state().visible != _state().open


@contextmanager
def _having(state: _State) -> Iterator[None]:
    before = _state()
    put_on_this_thread(state)
    try:
        yield
    finally:
        put_on_this_thread(before)


def opened(levels: Iterable[Level]) -> AbstractContextManager[None]:
    """Open these levels on this thread, for a block."""
    levels = tuple(levels)
    return _having(_State(levels, levels))


def seeing(levels: Iterable[Level]) -> AbstractContextManager[None]:
    """Make only these levels visible to operators on this thread, for a block."""
    return _having(_state()._replace(visible=tuple(levels)))


def plainly(op: Any, args: Any, kwargs: Any) -> Any:
    """The operator without tangents."""
    with below_levels():
        return op(*args, **kwargs)


def as_packing() -> AbstractContextManager[None]:
    """A block in which a hook on saved tensors, which is user code, packs one."""
    levels = _state().open
    return _having(_State(levels, levels, packing=True))


def packing() -> bool:
    """Whether a hook on saved tensors is packing one."""
    return _state().packing


def tangent(x: Any, level: Level) -> Tensor | None:
    """The tangent of ``x`` at a level, not copied; None for zero."""
    if not isinstance(x, Tensor) or not is_differentiable(x):
        return None
    shadow = level.shadows.get(storage_of(x))
    if shadow is None:
        return None
    if shadow.unknown:
        raise NotImplementedError(
            f"the tangent of a tensor at a dual level is needed, and is unknown: the tensor is {shadow.unknown}, and "
            "PyTorch's table has no derivative for it. In a backward pass, create_graph=True may avoid it."
        )
    return shadow.of(x)


def forget(x: Tensor, level: Level, what: str) -> None:
    """Record that the tangent of ``x``, described by ``what``, is unknown, not zero."""
    storage = storage_of(x)
    if storage is not None:
        level.shadows.put(storage, Shadow(x.new_empty(0), what))  # not x: it would keep its own storage


def unknown_as(x: Any, level: Level) -> str:
    """The reason that `forget` recorded for the tangent of ``x``; empty if the tangent is known."""
    shadow = level.shadows.get(storage_of(x)) if isinstance(x, Tensor) else None
    return shadow.unknown if shadow is not None else ""


def innermost(tensors: Sequence[Tensor], levels: Levels) -> Level | None:
    """The innermost level at which one of the tensors has a tangent."""
    storages = None
    for level in reversed(levels):
        if len(level.shadows):
            if storages is None:
                storages = [storage_of(x) for x in tensors]
            if any(level.shadows.get(s) is not None for s in storages):
                return level
    return None


def _has_tangent(x: Tensor) -> bool:
    return innermost([x], _state().open) is not None


hooks.has_level_tangent = _has_tangent


def outside(levels: Levels, level: Level) -> Levels:
    """The levels outside of ``level``."""
    return [other for other in levels if other.depth < level.depth]


def inside(levels: Levels, level: Level) -> Levels:
    """The levels inside of ``level``."""
    return [other for other in levels if other.depth > level.depth]


def fresh(x: Tensor, levels: Levels) -> Tensor:
    """A copy of ``x`` with the same metadata, on a new storage, with its tangents at these levels."""
    if x.is_nested:
        return strided_nested(fresh(x.values(), levels), *nested_strides(x))
    made = copied(x)
    for level in levels:
        if (t := tangent(x, level)) is not None:
            give(made, level, fresh(t, outside(levels, level)), levels, own=True)
    return made


def give(x: Tensor, level: Level, t: Tensor, levels: Levels, *, own: bool) -> None:
    """Make ``t`` the tangent of ``x``, with its tangents at the outer levels.

    Args:
        x: a tensor.
        level: the level of ``t``.
        t: the size of ``x``.
        levels: all levels.
        own: whether nothing else reads or writes the memory of ``t``, which may then become the shadow.
    """
    storage = storage_of(x)
    assert storage is not None
    shadow = level.shadows.get(storage)
    if shadow is None:
        if own and _fits(x, t):
            level.shadows.put(storage, Shadow(t))
            return
        shadow = Shadow.zeros(x)
        level.shadows.put(storage, shadow)
    write(unexpanded(shadow.of(x), x), unexpanded(t, x), outside(levels, level))


def _fits(x: Tensor, t: Tensor) -> bool:
    """Whether ``t`` can be the base of a shadow of the storage of ``x``, without a copy."""
    return (
        type(t) is Tensor
        and not (t.requires_grad and t.is_leaf)
        and t.dtype is x.dtype
        and t.device == x.device
        and t.shape == x.shape
        and t.stride() == x.stride()
        and not (x.is_conj() or x.is_neg() or t.is_conj() or t.is_neg())
        and is_dense(x)
        and is_dense(t)
    )


def write(x: Tensor, value: Tensor, levels: Levels) -> None:
    """Copy ``value``, with its tangents at these levels, into ``x`` and thus into every tensor on its storage."""
    unknown = {level: what for level in levels if (what := unknown_as(value, level))}
    sources = [(level, tangent(value, level)) for level in levels if level not in unknown]
    x.copy_(value)
    for level, what in unknown.items():
        forget(x, level, what)
    for level, source in sources:
        target = tangent(x, level)
        if source is None and target is None:
            continue
        if target is None:
            if not is_differentiable(x):
                continue
            give(x, level, source.expand(x.shape), levels, own=False)  # type: ignore[union-attr]
        else:
            zero = torch.zeros((), dtype=x.dtype, device=x.device)
            write(target, zero if source is None else source, outside(levels, level))


def coefficient(x: Tensor, level: Level, levels: Levels) -> Tensor | None:
    """The derivative of ``x`` by a level's epsilon, with its tangents at all the others; None for zero.

    It is the tangent itself, and shares its memory, unless ``x`` has tangents at inner levels.
    """
    base = tangent(x, level)
    parts = []
    for inner in inside(levels, level):
        t = tangent(x, inner)
        if t is not None and (part := coefficient(t, level, outside(levels, inner))) is not None:
            parts.append((inner, part))
    if not parts:
        return base
    made = Shadow.zeros(x).of(x) if base is None else fresh(base, outside(levels, level))
    for inner, part in parts:
        give(made, inner, fresh(part, outside(levels, inner)), levels, own=True)
    return made


def add(x: Tensor, level: Level, t: Tensor, levels: Levels) -> None:
    """Add epsilon times ``t``, with its tangents at the other levels, to ``x``, which must not have such a term."""
    give(x, level, fresh(t, outside(levels, level)), levels, own=True)
    for inner in inside(levels, level):
        if (part := tangent(t, inner)) is not None:
            if (own := tangent(x, inner)) is None:
                give(x, inner, Shadow.zeros(x).of(x), levels, own=True)
                own = tangent(x, inner)
                assert own is not None
            add(own, level, part, outside(levels, inner))


def torch_unpacked(unpack: Callable[[Tensor], Any], x: Tensor, levels: Levels) -> tuple[Tensor, Tensor | None]:
    """The results of PyTorch's own ``unpack`` of ``x``, with the tangents of each at these levels."""
    primal, dual = unpack(x)
    parts = [
        (level, torch_unpacked(unpack, t, outside(levels, level)))
        for level in levels
        if (t := tangent(x, level)) is not None
    ]
    if dual is None and all(d is None for _, (_, d) in parts):
        return primal, None
    made, made_dual = copied(primal), Shadow.zeros(x).of(x) if dual is None else copied(dual)
    for level, (p, d) in parts:
        give(made, level, p, levels, own=False)
        if d is not None:
            give(made_dual, level, d, levels, own=False)
    return made, made_dual
