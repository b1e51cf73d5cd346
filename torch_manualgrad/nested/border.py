"""The border: functions on `Ragged` take torch's nested tensors too, and give back what came in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ragged import Ragged

__all__ = ["on_nested", "require_same_structure"]


def on_nested(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of `Ragged` accept torch nested tensors, strided or jagged, wherever it accepts a Ragged.

    Nested arguments, also in lists and tuples, are converted; every Ragged in the result (alone, in a list, a tuple or a
    named tuple) is converted back to the kind of the first nested argument. Tensors pass through. Which arguments have to
    have the same structure is the function's to say, with `require_same_structure`.

    Raises: TypeError: no argument is a Ragged or a nested tensor.
    """

    @functools.wraps(function)
    def on_either(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is Ragged and not any(map(_may_be_nested, (*args[1:], *kwargs.values()))):
            return function(*args, **kwargs)
        kinds: list[torch.layout | None] = []
        known: dict[int, Ragged] = {}
        inside = [_enter(a, kinds, known) for a in args]
        named = {k: _enter(a, kinds, known) for k, a in kwargs.items()}
        if not kinds:
            found = ", ".join(type(a).__name__ for a in args)
            raise TypeError(f"{function.__name__}: expected a Ragged or a nested tensor, got ({found})")
        result = function(*inside, **named)
        return result if kinds[0] is None else _leave(result, kinds[0])

    return on_either


def _may_be_nested(argument: Any) -> bool:
    return argument.is_nested if isinstance(argument, Tensor) else type(argument) in (list, tuple)


def _enter(argument: Any, kinds: list[torch.layout | None], known: dict[int, Ragged]) -> Any:
    if isinstance(argument, Ragged):
        kinds.append(None)
    elif isinstance(argument, Tensor):
        if argument.is_nested:
            kinds.append(argument.layout)
            if id(argument) not in known:  # as in x * x
                known[id(argument)] = Ragged.from_nested(argument)
            return known[id(argument)]
    elif type(argument) in (list, tuple):
        return type(argument)(_enter(a, kinds, known) for a in argument)
    return argument


def _leave(result: Any, layout: torch.layout) -> Any:
    if isinstance(result, Ragged):
        return result.to_nested(layout)
    if isinstance(result, (list, tuple)):
        made = [_leave(r, layout) for r in result]
        return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
    return result


def require_same_structure(x: Ragged, other: Ragged, *, name: str = "other") -> None:
    """Check that two batches have the same components' sizes in the same ragged dims; their dense sizes may differ.

    Offsets are the same if they are one tensor; else they are compared, for which a GPU is waited (not in a graph).

    Args:
        name: what the error calls the second.
    Raises:
        ValueError: naming what differs: the number of components or of dims, the ragged dims, or the offsets or sizes.
    """
    for what, a, b in (
        ("number of components", x.batch, other.batch),
        ("number of dims", x.dim(), other.dim()),
        ("ragged dims", x.ragged_dims, other.ragged_dims),
        ("places along the ragged dim", x.values.shape[x.packed_dim], other.values.shape[other.packed_dim]),
    ):
        if a != b and not (what.startswith("places") and x.sizes is not None):
            raise ValueError(f"{name}: the {what} differ: {a} and {b}")
    if x.offsets is other.offsets and x.sizes is other.sizes:
        return
    if torch.compiler.is_compiling() or type(x.offsets) is not Tensor or type(other.offsets) is not Tensor:
        return
    for what, mine, others in zip(("offsets", "sizes"), x.read(), other.read()):
        if mine != others:
            raise ValueError(f"{name}: the {what} differ: {mine} and {others}")
