"""The interface of `forward_ad` to compiled functions, and to calls with a rule for the whole call.

Such a call calls an operator on a list of tensors. At a level it has the operator's jvp. A Taylor series is computed from
outside: the call is a function of pytrees, which nested ``torch.func.jvp`` differentiates along the curve.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .internals import own_levels_are_open, pytree

__all__ = ["Series", "apart_from_levels", "compilers", "has_series", "hooks", "is_in_forward_ad", "jvps", "of_series"]


class Series:
    """The base of Taylor series: tensors for functions that support them, but not always for PyTorch."""


class _Hooks:
    """Functions of `forward_ad`, which is not imported before it is used."""

    by_jvps: Callable[[Callable[..., Any], Sequence[Any]], Any]  # a function of pytrees with series in them
    has_level_tangent: Callable[[Tensor], bool]


hooks = _Hooks()

#: For compiled functions: compiles a transform in the same way, ``compile(lambda f: laplacian(f, batch_dims=1), key)``. Its
#: code is used again for the same key.
compilers: weakref.WeakKeyDictionary[Callable[..., Any], Callable[[Callable[..., Any], Any], Callable[..., Any]]]
compilers = weakref.WeakKeyDictionary()

#: ``(values, outputs, tangents) -> tangents of the outputs``, by the name of an operator.
jvps: dict[str, Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]] = {}


def has_series(tree: Any) -> bool:
    """Whether a leaf of a pytree is a Taylor series."""
    return any(isinstance(x, Series) for x in pytree.tree_leaves(tree))


def of_series(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``function(*args)``, for pytrees with Taylor series as leaves."""
    return hooks.by_jvps(function, args)


def apart_from_levels(x: Tensor) -> Tensor:
    """The tensor, for calls outside of levels; a copy if it has a tangent, because shared memory shares the tangent."""
    return x.clone() if is_in_forward_ad(x) else x


def is_in_forward_ad(x: Tensor) -> bool:
    """Whether a tensor is a Taylor series, or has a tangent at a level of `forward_ad` that is open on this thread."""
    return isinstance(x, Series) or own_levels_are_open() and hooks.has_level_tangent(x)
