"""Dual levels: forward mode like PyTorch's ``forward_ad``, nested to any depth, in eager mode.

Inside a level every operator computes its tangent by the rule in ``mg.rules``, from the tangents of its arguments. The
outer levels see the rule's formula. So $n$ levels give mixed derivatives of order $n$.

How calls are intercepted: a ``TorchDispatchMode`` runs below autograd: tangents computed there have no history, so the
gradient of a tangent is lost, and ``x.detach()`` looks the same as autograd saving a tensor. A ``TorchFunctionMode``
runs above autograd, but receives calls from Python only: neither calls of composite functions in C++, nor the backward
pass. So a dispatcher fallback at a key above autograd intercepts the calls. It is active on a thread while the thread
has an open level. It receives each operator from C++ and Python, forward and backward, and autograd tracks its results
as usual. Composite operators are decomposed. An operator whose derivative is unknown raises.

`layout` describes where tangents are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.internals import (
    below_levels,
    counted,
    in_functorch,
    intercept,
    intercepting,
    nested_strides,
    storage_of,
    strided_nested,
)
from ...core.schema import is_differentiable
from ..jets.tensor import refuse_inside
from . import state as tangent_state
from .calls import call
from .functions import Functions
from .state import add, coefficient, fresh, is_inside, opened, visible

__all__ = ["Level", "UnpackedDual", "dual_level", "make_dual", "unpack_dual"]


class UnpackedDual(NamedTuple):
    """A tensor without its tangent at one level, and that tangent, or None for zero."""

    primal: Tensor
    tangent: Tensor | None


class Level(tangent_state.Level):
    """One dual level of the thread that enters it. Made by `dual_level`."""

    _guards: ExitStack

    def __enter__(self) -> Level:
        if self.depth:
            raise RuntimeError(f"{self!r} has been entered before; make another by dual_level()")
        if in_functorch():
            raise RuntimeError("dual_level: a level cannot be opened inside of a torch.func transform")
        refuse_inside("dual_level")
        intercept(call)
        levels = (*visible(), self)
        self.depth, self.all = len(levels), levels
        with ExitStack() as guards:
            guards.enter_context(counted(is_inside))
            guards.enter_context(opened(levels))
            guards.enter_context(Functions())
            guards.enter_context(intercepting())
            self._guards = guards.pop_all()
        self.is_open = True
        return self

    def __exit__(self, *exception: Any) -> None:
        if visible()[-1:] != (self,):
            raise RuntimeError(f"{self!r} cannot be left: it is not the innermost level of this thread")
        self.is_open = False
        self.shadows.clear()
        self._guards.close()

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Make this level, and its outer levels, visible to operators on another thread, for a block.

        Raises:
            RuntimeError: the level is not open, or this thread sees levels already.
        """
        if not self.is_open or visible():
            reason = "this thread sees levels already" if self.is_open else "it is not open"
            raise RuntimeError(f"{self!r} cannot be seen on this thread: {reason}")
        with opened(self.all), Functions(), intercepting():
            yield


def dual_level() -> Level:
    """A level at which tensors can have tangents: ``with dual_level() as level: ...``.

    Levels nest to any depth, and belong to the thread that enters them (`Level.on_this_thread`). At the end of the block
    all tangents at the level are freed; those that `unpack_dual` returned become ordinary tensors.

    Returns:
        The level, which can be entered once. ``level.depth`` is the number of its outer levels plus 1.

    Raises:
        RuntimeError: on entry, inside of a torch.func transform or a second time; at the end, if an inner level is open.

    Note:
        Compiled functions run in eager mode inside of a level.

    References:
        ``torch.autograd.forward_ad.dual_level``, which does not nest.
    """
    return Level()


def make_dual(primal: Tensor, tangent: Tensor, *, level: Level | None = None) -> Tensor:
    """A tensor with the values of ``primal`` and a tangent.

    Args:
        primal: (*), real or complex, dense or strided nested. It may have tangents at other levels.
        tangent: the sizes, dtype and device of ``primal``. It may have tangents at other levels.
        level: an open level; by default the innermost.

    Returns:
        A copy of ``primal`` with the same metadata, connected to it for autograd. ``primal`` itself has no tangent, so
        it can also be made dual in another direction. The tangent is a copy of ``tangent``, with the metadata of the
        primal.

    Raises:
        RuntimeError: no level is open, or ``level`` is not; elements of ``primal`` overlap other than by ``expand``.
        TypeError: an argument is not a tensor, or not real or complex, or the dtypes, devices or layouts differ.
        ValueError: the sizes differ; ``primal`` or ``tangent`` has a tangent at this level already; ``primal`` is expanded,
            and ``tangent`` is not.

    References:
        ``torch.autograd.forward_ad.make_dual``, which returns a view of ``primal``.
    """
    level, levels = _chosen("make_dual", level)
    with below_levels():
        _check(primal, tangent, level, levels)
        if primal.is_nested:
            dual = _dual(primal.values(), tangent.contiguous().values(), level, levels)
            return strided_nested(dual, *nested_strides(primal))
        return _dual(primal, tangent, level, levels)


def unpack_dual(tensor: Tensor, *, level: Level | None = None) -> UnpackedDual:
    """A tensor's value without its tangent at a level, and that tangent.

    Args:
        tensor: (*).
        level: an open level, of this thread or another; by default the innermost of this thread.

    Returns:
        ``(primal, tangent)``, each with the tangents of ``tensor`` at the other levels. Without a tangent these are
        ``tensor`` and None; else ``primal`` is a copy. The tangent is not a copy: changing it in place also changes
        ``tensor``, unless ``tensor`` has tangents at inner levels.

    Raises:
        RuntimeError: no level is open, or ``level`` is not.
        TypeError: ``tensor`` is not a tensor.

    References:
        ``torch.autograd.forward_ad.unpack_dual``.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"unpack_dual: expected a tensor, got {type(tensor).__name__}")
    level, levels = _chosen("unpack_dual", level)
    with below_levels():
        nested = tensor.is_nested and tensor.layout is torch.strided
        part = coefficient(tensor.values() if nested else tensor, level, levels)
        if part is None:
            return UnpackedDual(tensor, None)
        if nested:
            part = strided_nested(part, *nested_strides(tensor))
        return UnpackedDual(fresh(tensor, [other for other in levels if other is not level]), part)


def _chosen(what: str, level: Level | None) -> tuple[Level, tuple[Level, ...]]:
    """The level, and all levels that apply."""
    levels: Any = visible()
    if level is None:
        if not levels:
            raise RuntimeError(f"{what}: no dual level is open on this thread; call it inside of `with dual_level():`")
        return levels[-1], levels
    if not isinstance(level, Level):
        raise TypeError(f"{what}: level must be the result of dual_level(), got {level!r}")
    if not level.is_open:
        raise RuntimeError(f"{what}: level is {level!r}")
    return level, levels if level in levels else level.all


def _check(primal: Any, tangent: Any, level: Level, levels: tuple[Level, ...]) -> None:
    for name, x in (("primal", primal), ("tangent", tangent)):
        if not isinstance(x, Tensor):
            raise TypeError(f"make_dual: {name} must be a tensor, got {type(x).__name__}")
        if not is_differentiable(x):
            raise TypeError(f"make_dual: {name} must be real or complex floating point, got dtype {x.dtype}")
        if in_functorch() or storage_of(x) is None:
            raise TypeError(
                f"make_dual: {name} must be a dense or strided nested tensor outside torch.func transforms, got "
                f"{type(x).__name__} of layout {x.layout}"
            )
    for what in ("dtype", "device", "is_nested"):
        if getattr(primal, what) != getattr(tangent, what):
            raise TypeError(
                f"make_dual: tangent has {what} {getattr(tangent, what)}, and primal {getattr(primal, what)}"
            )
    sizes = [nested_strides(x)[0].tolist() if x.is_nested else list(x.shape) for x in (primal, tangent)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"make_dual: tangent has sizes {sizes[1]}, and primal {sizes[0]}")
    values = [x.values() if x.is_nested else x for x in (primal, tangent)]
    if coefficient(values[0], level, levels) is not None:
        raise ValueError(f"make_dual: primal has a tangent at level {level!r} already, which cannot be set again")
    if coefficient(values[1], level, levels) is not None:
        raise ValueError(f"make_dual: tangent itself has a tangent at level {level!r}, where its square is zero")
    if primal.is_nested and not primal.is_contiguous():
        raise ValueError("make_dual: primal is a nested tensor whose components do not fill its buffer in order")
    if not primal.is_nested:
        for dim, (n, stride, other) in enumerate(zip(primal.shape, primal.stride(), tangent.stride())):
            if n > 1 and not stride and other:
                raise ValueError(
                    f"make_dual: primal is expanded in dim {dim}, where its elements share memory, and tangent, of strides "
                    f"{tangent.stride()}, is not: clone() primal, or expand tangent"
                )


def _dual(primal: Tensor, tangent: Tensor, level: Level, levels: tuple[Level, ...]) -> Tensor:
    dual = fresh(primal, levels)
    add(dual, level, tangent, levels)
    return dual
