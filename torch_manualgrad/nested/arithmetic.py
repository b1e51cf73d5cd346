"""Elementwise operators of two arguments, at least one of them nested.

torch's own operators act on the values and are differentiable in every mode. This module aligns the other argument with
the values. The other argument may be

- a number, or a tensor without dims;
- another nested tensor with the same components; dense dims broadcast;
- a dense tensor that broadcasts to every component, (D,) or (1, D), or one entry per component, (B, 1, D), with size 1
  (or no dim) in the ragged dims;
- a padded tensor, (B, L, D), as `Ragged.to_padded` returns it, with the length of the longest component. Each component uses
  only the entries within its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .conversion import on_nested, require_same_structure
from .packing import readable, strided_positions
from .ragged import Ragged

__all__ = [
    "add",
    "aligned",
    "div",
    "elementwise",
    "maximum",
    "minimum",
    "mul",
    "of_entries",
    "pow",
    "sub",
    "together",
    "where",
]

Operand = Ragged | Tensor | float | complex


def elementwise(function: Callable[..., Tensor], x: Operand, other: Operand, **options: Any) -> Ragged:
    """Apply ``function`` to two arguments, entry by entry; either may be dense.

    Args:
        function: an elementwise function of two tensors.
        x: a Ragged, a tensor or a number; see the module's docstring.
        other: a Ragged, a tensor or a number; at least one of the two is a Ragged.
        options: passed on to ``function``.

    Returns:
        A Ragged with the components of the nested argument; with one ragged dim, its dense dims may broadcast.

    Raises:
        ValueError: nested arguments of different structure, or a dense one that does not broadcast.
        TypeError: neither argument is a Ragged.
    """
    return together(function, (x, other), ("x", "other"), **options)


def together(
    function: Callable[..., Tensor], operands: Sequence[Operand], names: Sequence[str], **options: Any
) -> Ragged:
    """`elementwise` of any number of arguments, with their names in errors."""
    nested, values = aligned(operands, names)
    return of_entries(nested, function(*values, **options))


def aligned(operands: Sequence[Operand], names: Sequence[str]) -> tuple[Ragged, list[Any]]:
    """The first Ragged among the arguments, and all of them in a form that broadcasts with its values.

    Args:
        operands: as in `elementwise`.
        names: the arguments' names in errors.
    """
    nested = next((x for x in operands if isinstance(x, Ragged)), None)
    if nested is None:
        raise TypeError(f"expected a Ragged, got {' and '.join(type(x).__name__ for x in operands)}")
    return nested, [_laid(nested, x, name) for x, name in zip(operands, names)]


def of_entries(nested: Ragged, values: Tensor) -> Ragged:
    """Results for the entries of a Ragged, whose dense dims may have been broadcast."""
    if nested.sizes is not None:
        return nested.like(values)
    return nested.like(
        values, [nested.batch, *(None if d == nested.packed_dim else n for d, n in enumerate(values.shape))]
    )


def _laid(nested: Ragged, operand: Operand, name: str) -> Any:
    """The operand in a form that broadcasts with the values of ``nested``."""
    if operand is nested or not isinstance(operand, (Ragged, Tensor)):
        return nested.values if operand is nested else operand
    if isinstance(operand, Ragged):
        require_same_structure(nested, operand, name=name)
        if nested.shape != operand.shape and not (nested.sizes is None and _broadcasts(nested, operand.shape)):
            raise ValueError(f"{name}: the dense sizes differ: {nested.summary()} and {operand.summary()}")
        return operand.values
    if operand.dim() == 0:
        return operand
    given, dims = list(operand.shape), nested.dim()
    full = operand.reshape([1] * (dims - len(given)) + given) if len(given) <= dims else operand
    sizes = list(full.shape)
    padded = len(given) <= dims and any(sizes[d] != 1 for d in nested.ragged_dims)
    fits = len(given) <= dims and sizes[0] in (1, nested.batch)
    fits = fits and (nested.sizes is not None or _broadcasts(nested, sizes))
    if not fits or padded and (len(given) < dims or not _as_long(nested, sizes)):
        raise ValueError(
            f"{name}: shape {given} does not broadcast to {nested.summary()}; expected at most {dims} dims, "
            f"1 or {nested.batch} in the batch dim if it is there, and 1 in ragged dims or, with a batch dim, the size of "
            "the longest component"
        )
    if nested.sizes is not None:
        return _laid_flat(nested, full, name)
    if padded:
        full = full.expand(nested.batch, *sizes[1:])
        (ragged,), total = nested.ragged_dims, nested.values.shape[nested.packed_dim]
        return Ragged.from_padded(full, offsets=nested.offsets, ragged_dim=ragged, total=total).values
    if sizes[0] == 1:
        return full.squeeze(0)
    rows = full.expand(nested.batch, *sizes[1:]).squeeze(nested.packed_dim + 1)
    return rows.index_select(0, nested.segment_ids()).movedim(0, nested.packed_dim)


def _broadcasts(nested: Ragged, sizes: Sequence[int | None]) -> bool:
    """Whether the dense dims broadcast."""
    return all(n is None or n == m or 1 in (n, m) for n, m in zip(nested.shape[1:], sizes[1:]))


def _as_long(nested: Ragged, sizes: Sequence[int]) -> bool:
    """Whether a dense tensor's sizes in the ragged dims are 1 or those of the longest components.

    True if the components' sizes cannot be read. Extra entries are then ignored, and the last one replaces missing ones.
    """
    if not readable(nested.offsets):
        return True
    largest = nested.component_sizes().amax(0).tolist() if nested.batch else [0] * (nested.dim() - 1)
    return all(sizes[d] in (1, largest[d - 1]) for d in nested.ragged_dims)


def _laid_flat(nested: Ragged, full: Tensor, name: str) -> Tensor:
    for d, (n, given) in enumerate(zip(nested.shape[1:], full.shape[1:]), 1):
        if n is not None and given not in (1, n):
            raise ValueError(f"{name}: size {given} in dim {d} does not broadcast to {nested.summary()}")
    contiguous = full.contiguous()
    step = [0 if n == 1 else s for n, s in zip(full.shape, contiguous.stride())]
    device = nested.offsets.device
    strides = torch.tensor(step[1:], device=device).expand(nested.batch, -1)
    starts = torch.arange(nested.batch, device=device) * step[0]
    positions = strided_positions(nested.component_sizes(), strides, starts, nested.values.shape[0])
    return contiguous.reshape(-1).index_select(0, positions)


def where(condition: Operand, input: Operand, other: Operand) -> Ragged:
    """Entries of ``input`` where a condition holds, and of ``other`` elsewhere, as `torch.where`.

    Args:
        condition: booleans; a `Ragged`, or dense as in `add`.
        input: a `Ragged`, a dense tensor or a number, as in `add`.
        other: a `Ragged`, a dense tensor or a number, as in `add`.

    Returns:
        A `Ragged`.

    Raises:
        ValueError: arguments that do not fit.
        TypeError: none of them is a `Ragged`.
    """
    return together(torch.where, (condition, input, other), ("condition", "input", "other"))


@on_nested
def add(x: Operand, other: Operand, *, alpha: float = 1) -> Ragged:
    """$x + alpha other$.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.
        alpha: the factor.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.
    """
    return elementwise(torch.add, _tensor(x, other), other, alpha=alpha)


@on_nested
def sub(x: Operand, other: Operand, *, alpha: float = 1) -> Ragged:
    """$x - alpha other$.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.
        alpha: the factor.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.
    """
    return elementwise(torch.sub, _tensor(x, other), other, alpha=alpha)


@on_nested
def mul(x: Operand, other: Operand) -> Ragged:
    """$x other$, entry by entry.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.
    """
    return elementwise(torch.mul, x, other)


@on_nested
def div(x: Operand, other: Operand, *, rounding_mode: Literal["trunc", "floor"] | None = None) -> Ragged:
    """$x / other$, with optional rounding.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.
        rounding_mode: "trunc", "floor" or None; rounded, the gradient is 0.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.
    """
    return elementwise(torch.div, _tensor(x, other), other, rounding_mode=rounding_mode)


@on_nested
def pow(x: Operand, other: Operand) -> Ragged:
    """$x$ to the power of other.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.

    Note:
        Where not differentiable: where `torch.pow` is not: 0 to the power 0 has gradient 0; a negative $x$ to a real
        power is nan.
    """
    return elementwise(torch.pow, x, other)


@on_nested
def maximum(x: Operand, other: Operand) -> Ragged:
    """The greater of both, entry by entry.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.

    Note:
        Where not differentiable: at a tie, where each gets half of the gradient.
    """
    return elementwise(torch.maximum, _tensor(x, other), _tensor(other, x))


@on_nested
def minimum(x: Operand, other: Operand) -> Ragged:
    """The smaller of both, entry by entry.

    Args:
        x: as in `elementwise`.
        other: as in `elementwise`.

    Returns:
        As `elementwise`.

    Raises:
        ValueError: as `elementwise`.

    Note:
        Where not differentiable: at a tie, where each gets half of the gradient.
    """
    return elementwise(torch.minimum, _tensor(x, other), _tensor(other, x))


def _tensor(operand: Operand, other: Operand) -> Operand:
    """Convert a number to a tensor like the values of ``other``, for functions that take no numbers."""
    if isinstance(operand, (Ragged, Tensor)) or not isinstance(other, Ragged):
        return operand
    return other.values.new_zeros(()) + operand  # in the dtype of the sum: 0.5 with integers stays 0.5
