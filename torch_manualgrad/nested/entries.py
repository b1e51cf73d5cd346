"""Functions of single entries of a `Ragged`: embedding, one_hot, where, and normalize.

They apply torch's own functions to the values, with torch's derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import Operand, together
from .ragged import Ragged
from .reductions import vector_norm
from .reshaping import one_ragged_dim

__all__ = ["embedding", "normalize", "one_hot", "positions", "where"]


def _with_new_last_dim(x: Ragged, values: Tensor) -> Ragged:
    return x.like(values, [*x.shape, values.shape[-1]])


def embedding(input: Ragged, weight: Tensor, *args: Any, **kwargs: Any) -> Ragged:
    """Look up rows of a matrix by the indices in a batch, as ``torch.nn.functional.embedding``.

    Args:
        input: integers, with one ragged dim, (B, ..., *, ...).
        weight: (rows, D).
        args: as in torch.
        kwargs: as in torch.

    Returns:
        (B, ..., *, ..., D).

    Raises:
        ValueError: several ragged dims.
        IndexError: as in torch.
    """
    one_ragged_dim(input, "embedding")
    return _with_new_last_dim(input, F.embedding(input.values, weight, *args, **kwargs))


def one_hot(input: Ragged, num_classes: int = -1) -> Ragged:
    """Unit vectors, as ``torch.nn.functional.one_hot``.

    Args:
        input: integers, with one ragged dim.
        num_classes: as in torch.

    Returns:
        A `Ragged` with one more dim.

    Raises:
        ValueError: several ragged dims.
        RuntimeError: as in torch.
    """
    one_ragged_dim(input, "one_hot")
    return _with_new_last_dim(input, F.one_hot(input.values, num_classes))


def positions(x: Ragged) -> Ragged:
    """The position of each entry along the ragged dim of its component: 0, 1, ..., int64.

    Args:
        x: with one ragged dim.

    Returns:
        (B, *).

    Raises:
        ValueError: several ragged dims.
    """
    one_ragged_dim(x, "positions")
    places = torch.arange(x.values.shape[x.packed_dim], device=x.offsets.device)
    return Ragged.trusted(places - x.offsets[x.segment_ids()], x.offsets, (x.batch, None))


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


def normalize(input: Ragged, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Ragged:
    """Vectors divided by their norms, as ``torch.nn.functional.normalize``.

    Args:
        input: the batch.
        p: the order of the norm.
        dim: the dim of the vectors, not the batch.
        eps: the smallest divisor.
        out: None.

    Returns:
        The kind and shape of ``input``.

    Raises:
        IndexError: no such dim.
        ValueError: ``dim`` is the batch.
    """
    norms = vector_norm(input, p, dim, True)
    return input / (norms.clamp_min(eps) if isinstance(norms, Tensor) else norms.clamp(min=eps))
