"""Checks of the arguments of `jets` and `laplacian`, beyond their types."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_manualgrad.arguments import ArgumentError, described

__all__ = ["ORDERS", "check_at_least", "check_batch_dims", "check_like", "check_numbers", "check_order"]


#: The largest order: 171! is infinite in float64.
ORDERS = 170


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise if a number is too small."""
    if value < least:
        raise ArgumentError(f"{name}: expected at least {least}, got {value}")


def check_order(name: str, value: int) -> None:
    """Raise if derivatives of that order are not supported."""
    if not 1 <= value <= ORDERS:
        raise ArgumentError(f"{name}: expected from 1 to {ORDERS}, got {value}")


def check_numbers(name: str, x: Any) -> None:
    """Raise if ``x`` is not a strided tensor of real or complex numbers."""
    if not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(f"{name}: expected real or complex numbers, got {described(x)}")


def check_like(name: str, v: Tensor, other: str, x: Tensor) -> None:
    """Raise if ``v`` is not a direction at ``x``: of its shape, and real if ``x`` is."""
    check_numbers(other, x)
    check_numbers(name, v)
    if tuple(v.shape) != tuple(x.shape):
        raise ArgumentError(f"{name}: expected the shape of {other}, {list(x.shape)}, got {list(v.shape)}")
    if v.is_complex() and not x.is_complex():
        raise ArgumentError(f"{name}: expected real numbers, as in {other}, got {v.dtype}")
    if v.device != x.device:
        raise ArgumentError(f"{name}: expected the device of {other}, {x.device}, got {v.device}")


def check_batch_dims(name: str, x: Any, batch_dims: int) -> None:
    """Raise if the argument of a function has too few dimensions, or is not a tensor of numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a Tensor as the first argument of f, got {described(x)}")
    check_numbers(f"{name}: the first argument of f", x)
    if batch_dims > x.ndim:
        raise ArgumentError(
            f"{name}: batch_dims: expected at most {x.ndim} for an argument of shape {list(x.shape)}, got {batch_dims}"
        )
