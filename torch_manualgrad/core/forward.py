"""What `forward_ad` knows of calls whose derivative is a rule for the whole call: their tangents at levels, and their series.

Such a call is one of an operator on a list of tensors. At a level it has the operator's jvp. A Taylor series is had from outside: the
call is a function of pytrees, which is differentiated along the curve by nested ``torch.func.jvp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .internals import own_levels_are_open, pytree

__all__ = ["Series", "apart_from_levels", "has_series", "hooks", "is_in_forward_ad", "jvps", "of_series"]


class Series:
    """The base of Taylor series: a tensor to functions that know them, though perhaps not to PyTorch."""


class _Hooks:
    """What `forward_ad` does, which is not imported before it is used."""

    by_jvps: Callable[[Callable[..., Any], Sequence[Any]], Any]  # a function of pytrees with series in them
    has_level_tangent: Callable[[Tensor], bool]


hooks = _Hooks()

#: ``(values, outputs, tangents) -> tangents of the outputs``, by the name of an operator.
jvps: dict[str, Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]] = {}


def has_series(tree: Any) -> bool:
    """Whether a leaf of a pytree is a Taylor series."""
    return any(isinstance(x, Series) for x in pytree.tree_leaves(tree))


def of_series(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``function(*args)``, of pytrees, where leaves are Taylor series."""
    return hooks.by_jvps(function, args)


def apart_from_levels(x: Tensor) -> Tensor:
    """The tensor, which calls outside of levels read; a copy if it has a tangent, as tensors that share memory share the tangent."""
    return x.clone() if is_in_forward_ad(x) else x


def is_in_forward_ad(x: Tensor) -> bool:
    """Whether a tensor is a Taylor series, or has a tangent at a level of `forward_ad` that is open on this thread."""
    return isinstance(x, Series) or own_levels_are_open() and hooks.has_level_tangent(x)
