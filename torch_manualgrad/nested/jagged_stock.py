"""Calls on jagged nested tensors that stay with PyTorch and are differentiated in its own graph; `strided` explains this.

They make one pass over the buffer, for which a node of ours (`jagged`) is not faster than PyTorch's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.internals import PLAIN, is_plain_jagged, jagged_structure
from .conversion import same_structure
from .jagged import has_plain_buffer
from .strided import CALLS

__all__ = ["stays"]


def stays(name: str, x: Any, *args: Any, **options: Any) -> bool:
    """Whether this call can stay in PyTorch's graph.

    Args:
        name: of the aten operator.
        x: the nested argument.
        args: the other arguments.
        options: the keyword arguments.
    """
    if not (CALLS.loaded and has_plain_buffer(x)):
        return False
    if name == "linear":
        parameters = [p for p in (*args, *options.values()) if p is not None]
        plain = all(type(p) in PLAIN and not p.is_nested for p in parameters)
        return plain and (x.requires_grad or any(p.requires_grad for p in parameters))
    if not args:
        return bool(x.requires_grad)
    if len(args) > 1 or any(value not in (None, 1) for value in options.values()):
        return False
    return _both(x, args[0]) if is_plain_jagged(args[0]) else x.requires_grad and _is_number(args[0])


def _both(x: Any, other: Any) -> bool:
    a, b = x._values, other._values
    if type(b) not in PLAIN or a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return (x.requires_grad or other.requires_grad) and same_structure(jagged_structure(x), jagged_structure(other))


def _is_number(x: Any) -> bool:
    """Whether ``x`` is a real constant."""
    if isinstance(x, Tensor):
        return type(x) in PLAIN and not (x.is_nested or x.dim() or x.requires_grad or x.is_complex())
    return type(x) in (int, float)
