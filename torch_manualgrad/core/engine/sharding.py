"""Registers sharding strategies with ``DTensor`` before its first call that reaches our operators.

Importing ``torch.distributed.tensor`` takes a second, and most programs do not use it, so nothing here imports it. A
distributed tensor that reaches one of our kernels shows that it is imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..internals import is_distributed, value_of
from ..registry import defined_ops
from ..schema import tensors_in

__all__ = ["computed_by_body", "ensure_registered", "is_sharded", "lock", "register_with", "registered", "takes_body"]

lock = threading.RLock()
registered: set[Any] = set()  # operators
computed_by_body: set[Any] = set()  # our opaque operators whose body runs on distributed tensors
_register: list[Callable[[], None]] = []
_count = 0  # the number of our operators when all were registered


def register_with(register: Callable[[], None]) -> None:
    """Set the function that registers all operators missing in `registered`, and adds them to it."""
    _register[:] = [register]


def ensure_registered(op: Any = None) -> None:
    """Register the missing strategies of this operator, or of all ours, if ``DTensor`` is imported."""
    global _count
    if "torch.distributed.tensor" not in sys.modules or op in registered or not _register:
        return
    if op is not None:
        _register[0]()
        registered.add(op)
    elif _count != len(defined_ops):
        _register[0]()
        _count = len(defined_ops)


def is_sharded(x: Any) -> bool:
    """Whether `x`, or the tensor inside its ``torch.func`` wrappers, is a ``DTensor``."""
    return is_distributed(value_of(x))


def takes_body(op: Any, values: Sequence[Any]) -> bool:
    """Whether the operator's body must run on these values: it is registered with `distributed.Body`, and they are distributed."""
    ensure_registered(op)
    return bool(computed_by_body) and op in computed_by_body and any(is_distributed(x) for x in tensors_in(values))
