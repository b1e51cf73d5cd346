"""The operators whose results an override with ``memory=True`` computes again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Argument", "Recomputable", "recomputables"]


@dataclass(frozen=True)
class Argument:
    """Where the node of a call has one of its tensors.

    Attributes:
        name: under which the node saves it. None: it does not.
        edge: the place of its gradient among the outputs of the node, which leads to the node that has computed it.
        optional: it may be absent.
    """

    name: str | None = None
    edge: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Recomputable:
    """How the first result of an operator is computed again from what its node keeps.

    Attributes:
        node: the name of the operator's nodes.
        call: ``(*arguments, *constants) -> result``, with the same bits as the operator's.
        arguments: the tensors of the call.
        constants: the names under which the node saves the constants of the call.
        result: the name under which the node saves the result, if it does.
        complete: ``(*arguments, *constants) -> constants``, where the node does not save all that the call needs; None if
            the result is to be saved.
        kept: how many of the arguments are those of the call; the others are for `complete` alone. None: all.
        in_place: place of an argument -> the same call, which writes the result over that argument; the arguments are of
            one shape and dtype.
        takes_dtype: the dtype of the result follows the constants.
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
