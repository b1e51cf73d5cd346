"""Distributed tensors (``torch.distributed.tensor``), which is not imported here: a program without them pays nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

__all__ = [
    "constants_replicated",
    "forget_placements",
    "is_distributed",
    "prefer_registered_sharding",
    "read_all_arguments",
    "sizes_are_local",
]


def is_distributed(x: Any) -> bool:
    """Whether `x` is a ``DTensor``."""
    kind = _dtensor()
    return kind is not None and isinstance(x, kind)


def _dtensor() -> Any:
    """The class ``DTensor``; None if it is not imported, or another thread is importing it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def constants_replicated(tensors: Sequence[Any]) -> Any:
    """Context manager: a plain tensor among distributed ones is the same on every rank, like a formula's constants.

    PyTorch's own ``implicit_replication`` does not restore the previous setting.
    """
    kind = _dtensor()
    return nullcontext() if kind is None or not any(isinstance(x, kind) for x in tensors) else _replicated()


@contextmanager
def _replicated() -> Iterator[None]:
    dispatcher = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def read_all_arguments(op: Any, signature: Any) -> None:
    """Cache strategies of an operator by every argument: ``register_sharding`` assumes that only numbers matter, and
    would reuse a result for a call with other dims, or another flag.
    """
    # importing the module takes a second; the caller has already imported it
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    first = next((i for i, a in enumerate(signature.arguments) if not a.is_tensor_like), 100)
    keywords = [a.name for a in signature.arguments if a.kwarg_only and not a.is_tensor_like]
    propagator = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, keywords or None, needs_pytree=True)


def prefer_registered_sharding(op: Any) -> None:
    """Give a strategy from ``register_sharding`` precedence: PyTorch prefers its own for one dim of the mesh.

    Each release has such strategies for more operators. Those before 2.11 have none.
    """
    propagator = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
    for name in ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy"):
        getattr(propagator, name, {}).pop(op, None)


def sizes_are_local(op: Any, place: int) -> None:
    """Pass the sizes of each rank's part to an operator that takes the sizes of its result."""
    propagator = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_shape_and_stride_idx[op] = place


def forget_placements() -> None:
    """Forget the placements of earlier calls, so that newly registered strategies apply."""
    sys.modules[
        "torch.distributed.tensor"
    ].DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
