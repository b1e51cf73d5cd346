"""Calls on strided nested tensors without Python, by csrc/calls/nested.cpp, if there is a library of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntFlag
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..internals import current_node
from ..libraries import calls_library, checked

__all__ = [
    "NestedCalls",
    "NestedCounts",
    "Way",
    "differentiable_pieces",
    "differentiates_views",
    "expect_jagged_tangents",
    "nested_counts",
]


class Way(IntFlag):
    """The tracked calls that stay with PyTorch."""

    NONE = 0
    STAYS = 1  # on strided tensors whose components are in order
    JAGGED = 2  # also with one jagged tensor and numbers
    PARAMETERS = 4  # also with a gradient of a dense argument
    SILU = 8  # the node calls SILU_BACKWARD
    SILU_BACKWARD = 16


class NestedCalls:
    """The C++ kernels that cover the Python kernels; without the library there are none.

    Args:
        ways: the covered operators ("aten::relu"). None: the kernels do nothing.
    """

    def __init__(self, ways: Mapping[str, Way]) -> None:
        self._ways = dict(ways)
        self._library = calls_library if ways else None

    @property
    def loaded(self) -> bool:
        """Whether there is a library for this torch."""
        return self._library is not None

    def mark(self, name: str, result: Tensor) -> Tensor:
        """Mark a result of PyTorch's own operator of this name, as if a kernel had left the call to it."""
        if self._library is not None:
            torch.ops.manualgrad_calls.mark_nested(result, int(self._ways.get(name, Way.NONE)))
        return result

    def before(self, op: Any) -> None:
        """Call this before registering a Python kernel for ``op``."""
        if self._library is not None and _name(op) in self._ways:
            checked(self._library.manualgrad_calls_nested_before(*_names(op)))

    def attach(self, op: Any) -> None:
        """Call this after that."""
        if self._library is not None and (way := self._ways.get(_name(op))) is not None:
            checked(self._library.manualgrad_calls_nested_attach(*_names(op), ctypes.c_int64(way)))

    def attach_buffers(self) -> None:
        """Register the kernels that compute on the whole buffer."""
        if self._library is not None:
            checked(self._library.manualgrad_calls_nested_attach_buffers())

    def detach(self) -> None:
        """Remove all of them. A thread inside of one crashes."""
        if self._library is not None:
            checked(self._library.manualgrad_calls_nested_detach())

    def continue_here(self) -> bool:
        """Whether this thread is in the backward of a call that these kernels left to PyTorch."""
        if self._library is None or current_node() is None:
            return False
        return bool(self._library.manualgrad_calls_nested_continues())


def expect_jagged_tangents() -> None:
    """Call this before a jagged tensor gets a tangent: from then on Python handles all calls on jagged tensors."""
    if calls_library is not None:
        calls_library.manualgrad_calls_nested_tangents()


def differentiates_views() -> bool:
    """Whether `differentiable_pieces` is available, which needs the library."""
    return calls_library is not None


def differentiable_pieces(
    x: Tensor, views: Sequence[Tensor], dim: int, starts: Sequence[int], lengths: Sequence[int]
) -> list[Tensor]:
    """Make views of a strided nested tensor, taken below autograd, differentiable in any order.

    Args:
        x: the strided nested tensor, tracked by autograd.
        views: its pieces along ``dim``, in order; along the batch these may be components.
        dim: from 0, the batch.
        starts: of the pieces.
        lengths: of the pieces. Along dims of the components the pieces must cover these.

    Returns:
        The views. Writing to them raises, as in PyTorch for several views from one call. The node saves no tensor.
    """
    found: list[Tensor] = torch.ops.manualgrad_calls.nested_pieces(x, views, dim, starts, lengths)
    return found


class NestedCounts(NamedTuple):
    """Counts of these kernels on one thread.

    Attributes:
        left_to_stock: tracked calls that stayed with PyTorch.
        on_buffers: calls on the whole buffer.
    """

    left_to_stock: int
    on_buffers: int


def nested_counts() -> NestedCounts:
    """The counts of this thread so far; zeros without the library. For tests."""
    found = (ctypes.c_int64 * 2)()
    if calls_library is not None:
        calls_library.manualgrad_calls_nested_counts(found)
    return NestedCounts(*found)


def _name(op: Any) -> str:
    return str(op.name()).removesuffix(".default")


def _names(op: Any) -> tuple[bytes, bytes]:
    return op._schema.name.encode(), op._schema.overload_name.encode()
