"""The largest and smallest entries of nested tensors, with dims as in `reductions`.

An extremum of an empty component is an error on the CPU; if the lengths cannot be read without synchronizing, it is
$+-inf$ without a gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .conversion import on_nested
from .ragged import Ragged
from .segment_maxima import segment_amax
from .slices import Dims, Extremum, Slices, one_dim, reduce

__all__ = ["amax", "amin", "max", "min"]


def _largest(s: Slices) -> Tensor:
    _check(s)
    return s.amax(s.values)


def _smallest(s: Slices) -> Tensor:
    _check(s)
    if not s.values.is_floating_point():
        return ~s.amax(~s.values)  # the negative of the least integer overflows
    return -s.amax(-s.values)


@on_nested
def amax(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The largest entry over ``dim``, as `torch.amax`.

    Args:
        x: real.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `sum`, in the dtype of ``x``.

    Raises:
        IndexError: a dim out of range; an empty slice, if the lengths can be read (see the module's docstring).
        ValueError, RuntimeError: as `sum`.

    Note:
        Where not differentiable: at ties, whose entries share the gradient equally.

    References:
        ATen amax.
    """
    return reduce(x, dim, keepdim, _largest)


@on_nested
def amin(x: Ragged, dim: Dims = None, keepdim: bool = False) -> Ragged | Tensor:
    """The smallest entry over ``dim``, as `torch.amin`.

    Args:
        x: real.
        dim: as in `sum`.
        keepdim: as in `sum`.

    Returns:
        As `amax`.

    Raises:
        IndexError, ValueError, RuntimeError: as `amax`.

    Note:
        Where not differentiable: as `amax`.

    References:
        ATen amin.
    """
    return reduce(x, dim, keepdim, _smallest)


def _first(s: Slices, largest: bool) -> Extremum:
    x, dim = s.values, s.along
    _check(s)
    if dim is None:
        found = (torch.max if largest else torch.min)(x, s.dense[0], keepdim=True)
        return Extremum(found.values, found.indices)
    here, start = s.positions(x)
    extreme = (_largest if largest else _smallest)(Slices(x.detach(), (), dim, s.offsets))
    attained = (x == s.expand(extreme)) | (x != x)
    count = x.shape[dim]
    at = -segment_amax.reference(torch.where(attained, -here, -count), s.offsets, dim)  # the first position
    nothing = (s.offsets.diff() == 0).reshape([-1 if d == dim else 1 for d in range(x.dim())])
    at = at.clamp(0, count - 1)
    values = torch.where(nothing, extreme, x.gather(dim, at))
    begin = s.offsets[:-1].long().reshape(nothing.shape)
    return Extremum(values, torch.where(nothing, 0, at - begin))


def _extremum(x: Ragged, dim: int | None, keepdim: bool, largest: bool) -> Any:
    if dim is None:
        if keepdim:
            raise ValueError("keepdim: given without a dim")
        return (torch.max if largest else torch.min)(x.values)
    one_dim(x, dim)
    return reduce(x, dim, keepdim, functools.partial(_first, largest=largest))


@on_nested
def max(x: Ragged, dim: int | None = None, keepdim: bool = False) -> Any:
    """The largest entry of all, or over one dim with its index, as `torch.max`.

    Args:
        x: real.
        dim: a dim of the components; None to reduce all entries.
        keepdim: whether the reduced dim stays, with size 1.

    Returns:
        `Extremum`: values and indices, each as from `sum`. An index is the position, within its component, of the first
        entry that attains the value. Without a ``dim``, a tensor.

    Raises:
        IndexError, RuntimeError: as `amax`.
        ValueError: ``dim`` is the batch, or keepdim without a dim.

    Note:
        Where not differentiable: at ties, where the chosen entry gets the whole gradient. Without a ``dim``, tied entries
        share it.

    References:
        ATen max.dim, value_selecting_reduction_backward.
    """
    return _extremum(x, dim, keepdim, True)


@on_nested
def min(x: Ragged, dim: int | None = None, keepdim: bool = False) -> Any:
    """The smallest entry of all, or over one dim with its index, as `torch.min`.

    Args:
        x: real.
        dim: as in `max`.
        keepdim: as in `max`.

    Returns:
        As `max`.

    Raises:
        IndexError, ValueError, RuntimeError: as `max`.

    Note:
        Where not differentiable: as `max`.

    References:
        ATen min.dim.
    """
    return _extremum(x, dim, keepdim, False)


def _check(s: Slices) -> None:
    """Raise for complex values, and for empty slices if the lengths can be read without synchronizing."""
    if s.values.is_complex():
        raise TypeError(f"x: expected real values, which have an order, got {s.values.dtype}")
    if s.along is None or s.offsets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = s.offsets.diff()
    if type(lengths) is Tensor and not lengths.all():
        at = int((lengths == 0).nonzero()[0])
        raise IndexError(f"x: component {at} is empty along the reduced dim, and has no extreme entry")
