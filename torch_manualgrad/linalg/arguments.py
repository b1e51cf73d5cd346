"""Checks of matrices and weights, beyond their types, that the functions of this package share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import ArgumentError
from ..core.internals import in_functorch, values_readable

__all__ = ["DtypeError", "broadcasts", "fits", "matrix", "positive_weights", "same_kind", "with_batch_dims"]

_HALVES = (torch.float16, torch.bfloat16)


class DtypeError(TypeError, NotImplementedError):
    """A function is not implemented for a dtype. It is a NotImplementedError too, which PyTorch's functions raise."""


def matrix(A: Tensor, name: str, *, square: bool = False) -> Tensor:
    """Check a matrix.

    Args:
        A: (*, m, n).
        name: the name of $A$ in error messages.
        square: whether $m = n$ is required.

    Returns:
        $A$, in float32 if it has half precision and autocast is on.

    Raises:
        ArgumentError: (a ValueError and a RuntimeError) $A$ has fewer than two dims, or is not square
            although it should be.
        TypeError: $A$ is nested or sparse, or its dtype is not float32, float64, complex64 or complex128.
    """
    if A.layout is not torch.strided or A.is_nested:
        raise DtypeError(f"{name}: expected a dense tensor, got one of layout {A.layout}")
    if A.dim() < 2:
        raise ArgumentError(f"{name}: expected a matrix or a batch of matrices, got shape {list(A.shape)}")
    if square and A.shape[-1] != A.shape[-2]:
        raise ArgumentError(f"{name}: expected square matrices, got shape {list(A.shape)}")
    if not (A.is_floating_point() or A.is_complex()):
        raise DtypeError(f"{name}: expected a floating point or complex dtype, got {A.dtype}")
    if A.dtype in _HALVES and torch.is_autocast_enabled(A.device.type):
        return A.float()
    if A.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise DtypeError(f"{name}: expected single or double precision, or autocast, got {A.dtype}")
    return A


def fits(B: Tensor, name: str, A: Tensor, other: str) -> Tensor:
    """Check that $B$ has the matrix shape, dtype and device of $A$, and a batch that broadcasts with that of $A$.

    Args:
        B: (*, m, n).
        name: the name of $B$ in error messages.
        A: (*, m, n).
        other: the name of $A$ in error messages.

    Returns:
        $B$.

    Raises:
        ArgumentError: another shape or device.
        DtypeError: another dtype.
    """
    if B.shape[-2:] != A.shape[-2:]:
        raise ArgumentError(f"{name}: expected the size of {other}, {list(A.shape[-2:])}, got {list(B.shape[-2:])}")
    same_kind(B, name, A, other)
    broadcasts(B, name, A, other)
    return B


def same_kind(B: Tensor, name: str, A: Tensor, other: str) -> Tensor:
    """Check that $B$ has the dtype and the device of $A$.

    Args:
        B: of any shape.
        name: the name of $B$ in error messages.
        A: of any shape.
        other: the name of $A$ in error messages.

    Returns:
        $B$.

    Raises:
        ArgumentError: another device.
        DtypeError: another dtype.
    """
    if B.dtype != A.dtype:
        raise DtypeError(f"{name}: expected the dtype of {other}, {A.dtype}, got {B.dtype}")
    _on_one_device(B, name, A, other)
    return B


def broadcasts(B: Tensor, name: str, A: Tensor, other: str) -> None:
    """Check that the batch of $B$, (*, m, n), broadcasts with that of $A$, (*, k, l).

    Args:
        B: (*, m, n).
        name: the name of $B$ in error messages.
        A: (*, k, l).
        other: the name of $A$ in error messages.

    Raises:
        ArgumentError: the batches do not broadcast.
    """
    _broadcast(B.shape[:-2], name, A.shape[:-2], other)


def with_batch_dims(*tensors: Tensor) -> list[Tensor]:
    """The matrices with the same number of batch dims; missing dims get size 1."""
    dims = max(x.dim() for x in tensors)
    return [x[(None,) * (dims - x.dim())] for x in tensors]


def positive_weights(weights: Tensor, name: str, points: Tensor) -> Tensor:
    """Check weights for points: finite, not negative, and not all 0.

    Args:
        weights: (*, N), real.
        name: the name of the weights in error messages.
        points: (*, N, d).

    Returns:
        The weights in the dtype of the points. Invalid weights become nan if values cannot be read.

    Raises:
        ArgumentError: invalid weights, if values can be read; or another device.
        DtypeError: complex weights.
    """
    if weights.is_complex():
        raise DtypeError(f"{name}: expected real numbers, got {weights.dtype}")
    if weights.shape[-1:] != points.shape[-2:-1]:
        raise ArgumentError(f"{name}: expected one for each of {points.shape[-2]} points, got {list(weights.shape)}")
    _on_one_device(weights, name, points, "P")
    _broadcast(weights.shape[:-1], name, points.shape[:-2], "P")
    weights = weights.to(points.dtype)
    refused = {
        "numbers that are finite and not negative": ~((weights >= 0) & weights.isfinite()),
        "one that is not 0": (weights == 0).all(-1, keepdim=True),
    }
    for expected, where in refused.items():
        if _readable(weights):
            if points.shape[-2] and where.any():
                raise ArgumentError(f"{name}: expected {expected}, got {weights.tolist()}")
        else:
            weights = torch.where(where, torch.nan, weights)
    return weights


def _on_one_device(x: Tensor, name: str, A: Tensor, other: str) -> None:
    if x.device != A.device:  # with one tensor on meta, PyTorch may return uninitialized memory
        raise ArgumentError(f"{name}: expected a tensor on {A.device}, where {other} is, got one on {x.device}")


def _broadcast(batch: Sequence[int], name: str, others: Sequence[int], other: str) -> None:
    for n, m in zip(reversed(batch), reversed(others)):
        if n != m and 1 not in (n, m):
            raise ArgumentError(
                f"{name}: its batch {list(batch)} does not broadcast with that of {other}, {list(others)}"
            )


def _readable(x: Tensor) -> bool:
    """Whether values can be read: not in a graph, nor under a transform, where the answer would depend on the transform."""
    return not torch.compiler.is_compiling() and not in_functorch() and values_readable([x])
