"""Selects PyTorch's own function or ours for a call on PyTorch's nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import explain
from ..core.internals import dual_jagged, has_tangent, is_nested_int, is_plain_jagged, tangents_possible
from .layouts import tracked

__all__ = ["REFUSALS", "choose"]

# The errors with which PyTorch's functions and ours refuse a call. Not every Exception: a hook may raise another one to
# end a recomputation.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def choose(
    function: Callable[..., Any], own: Callable[..., Any], args: Any, kwargs: Any, takes_nested_ints: bool = False
) -> Any:
    """Call our function if the call is differentiated, else PyTorch's; if the chosen one refuses, call the other.

    If both refuse, PyTorch's error is raised, with ours as its cause and in its message, because PyTorch's often says
    only that its class does not support the call. A call with a tangent never falls back to PyTorch, whose classes lose
    the tangent.
    """
    given = [*args, *kwargs.values()]
    given += [a for some in given if isinstance(some, (list, tuple)) for a in some]
    tensors = [a for a in given if isinstance(a, Tensor)]
    symbolic = any(map(is_nested_int, given)) and not takes_nested_ints
    if symbolic or any(map(_only_stock_holds, tensors)):
        return own(*args, **kwargs)
    dual = any(_dual(x) for x in tensors)
    if dual or any(map(tracked, tensors)):
        try:
            found = function(*args, **kwargs)
        except REFUSALS as refusal:
            if dual:
                raise
            try:
                return own(*args, **kwargs)
            except REFUSALS as error:
                explain(error, f"torch_manualgrad: {refusal}")
                raise error from refusal
        return own(*args, **kwargs) if found is NotImplemented else found
    try:
        return own(*args, **kwargs)
    except REFUSALS as error:
        try:
            found = function(*args, **kwargs)
        except REFUSALS as refusal:
            explain(error, f"torch_manualgrad: {refusal}")
            raise error from refusal
        if found is NotImplemented:
            raise
        return found


def _only_stock_holds(x: Tensor) -> bool:
    """Whether ``x`` is a strided tensor that `Ragged.from_nested` does not take."""
    strided = x.is_nested and not is_plain_jagged(x) and x.layout is torch.strided
    return strided and (x.dim() < 2 or not x.size(0))


def _dual(x: Tensor) -> bool:
    if x.is_nested:
        return not is_plain_jagged(x) and x.layout is torch.jagged and dual_jagged(x) is not None
    return tangents_possible([x]) and has_tangent(x)
