"""Batches of samples of unequal sizes: for ``DataLoader``, and from and to ``PackedSequence``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import default_collate

from .ragged import Ragged

__all__ = ["collate", "from_packed", "to_packed"]


def collate(samples: Sequence[Any]) -> Any:
    """A batch of samples, for ``DataLoader(dataset, collate_fn=mg.nested.collate)``.

    Args:
        samples: of one structure: tensors, numbers, strings, NumPy arrays, and dictionaries, tuples and lists of these.

    Returns:
        The structure of a sample. Tensors of one shape are stacked; tensors that differ in some sizes are a `Ragged`;
        everything else is as ``torch.utils.data.default_collate`` has it.

    Raises:
        ValueError: no samples, or tensors with different numbers of dims.
    """
    if not len(samples):
        raise ValueError("samples: expected at least one, got none")
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(collate, zip(*samples)))
    if isinstance(first, (tuple, list)):
        if len({len(sample) for sample in samples}) > 1:
            raise ValueError(f"samples: expected as many entries in each, got {[len(s) for s in samples]}")
        return type(first)(collate(list(column)) for column in zip(*samples))
    if type(first).__module__ == "numpy" and hasattr(first, "shape") and first.shape:
        return collate([torch.from_numpy(sample) for sample in samples])
    if isinstance(first, Tensor) and len({sample.shape for sample in samples}) > 1:
        return Ragged.from_components(samples)
    return default_collate(list(samples))


def to_packed(x: Ragged) -> PackedSequence:
    """The sequences as the recurrent modules of torch take them.

    Args:
        x: (B, *, ...), with sequences of at least one entry.

    Returns:
        The ``PackedSequence``; its order is that of the batch again after `from_packed`.

    Raises:
        ValueError: another ragged dim.
        RuntimeError: a sequence without entries, as torch says.
    """
    if x.ragged_dims != (1,):
        raise ValueError(f"to_packed: expected dim 1 as the only ragged one, got {x.summary()}")
    return pack_sequence(x.components(), enforce_sorted=False)


def from_packed(packed: PackedSequence) -> Ragged:
    """The sequences of a ``PackedSequence``, in the order of the batch.

    Args:
        packed: what ``nn.LSTM`` and the like return for one.

    Returns:
        (B, *, ...).

    Raises:
        TypeError: another argument.
    """
    if not isinstance(packed, PackedSequence):
        raise TypeError(f"packed: expected a PackedSequence, got {type(packed).__name__}")
    return Ragged.from_components(unpack_sequence(packed), ragged_dims=[1])
