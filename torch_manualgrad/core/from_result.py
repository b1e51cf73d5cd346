"""What a rule may say of the operator in place: its result tells the derivative, as well as its input does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FromResult"]


@dataclass(frozen=True)
class FromResult:
    """The vjp of an operator in place as a function of its result: a plain call then keeps no copy of what stood there.

    Attributes:
        vjp: for the first argument, which is written to; it reads ``result`` where the rule's own reads that.
        nonnegative: names of numbers among the arguments; if one is negative, the rule's own vjp is used.
    """

    vjp: Callable[..., Any]
    nonnegative: tuple[str, ...] = ()
