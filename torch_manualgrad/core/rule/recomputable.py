"""The operators whose results an override with ``memory=True`` recomputes in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Argument", "Recomputable", "recomputables"]


@dataclass(frozen=True)
class Argument:
    """The place of a call's tensor in its node.

    Attributes:
        name: under which the node saves it; None if it does not.
        edge: the place of its gradient among the outputs of the node, which leads to the node that computed it.
        optional: it may be absent.
    """

    name: str | None = None
    edge: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Recomputable:
    """How to recompute the first result of an operator from its node.

    Attributes:
        node: the name of the operator's nodes.
        call: ``(*arguments, *constants) -> result``, bitwise identical to the operator's.
        arguments: the tensors of the call.
        constants: the names under which the node saves the constants of the call.
        result: the name under which the node saves the result, if it does.
        complete: ``(*arguments, *constants) -> constants``, if the node does not save everything that the call needs;
            it returns None if the result must be saved.
        kept: how many of the arguments belong to the call; the others are only for `complete`. None: all.
        in_place: place of an argument -> the same call, which overwrites that argument with the result; the arguments
            have one shape and dtype.
        takes_dtype: the constants determine the dtype of the result.
    """

    node: str
    call: Callable[..., Tensor]
    arguments: Sequence[Argument]
    constants: Sequence[str] = ()
    result: str | None = None
    complete: Callable[..., tuple[Any, ...] | None] | None = None
    kept: int | None = None
    in_place: Mapping[int, Callable[..., Tensor]] = field(default_factory=dict)
    takes_dtype: bool = False


recomputables: dict[str, Recomputable] = {}
