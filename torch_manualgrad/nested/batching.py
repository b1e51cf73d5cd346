"""Batches of samples of unequal sizes: for ``DataLoader``, and from and to ``PackedSequence``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import default_collate

from ..arguments import ArgumentError, described
from .ragged import Ragged

__all__ = ["collate", "from_packed", "to_packed"]


def collate(samples: Sequence[Any], ragged: bool | Collection[Any] | None = None) -> Any:
    """Collate samples into a batch, for ``DataLoader(dataset, collate_fn=mg.nested.collate)``.

    Args:
        samples: samples with the same structure: tensors, numbers, strings, NumPy arrays, and dictionaries, tuples and
            lists of these.
        ragged: which tensors become a `Ragged`, whatever their sizes: the keys of a dictionary, or the positions in a tuple or
            list; the other tensors must have one shape. True for all tensors with dims. None for those whose sizes differ
            in this batch.

    Returns:
        The structure of a sample, with a `Ragged` or a stacked tensor for tensors. Everything else is collated by
        ``torch.utils.data.default_collate``.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: no samples, samples of different structures, or tensors with different numbers of dims.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, (str, bytes)):
        raise TypeError(f"samples: expected a list, got {described(samples)}")
    if not (ragged is None or isinstance(ragged, (bool, Collection))) or isinstance(ragged, (str, Tensor)):
        raise TypeError(f"ragged: expected a bool, keys or positions, got {described(ragged)}")
    if not samples:
        raise ArgumentError("samples: expected at least one, got none")
    first = samples[0]
    kind: Any = next((k for k in (Mapping, (tuple, list), Tensor) if isinstance(first, k)), object)
    for i, sample in enumerate(samples):
        if not isinstance(sample, kind):
            raise ArgumentError(
                f"samples: expected {type(first).__name__}, like the first, got {described(sample)} at {i}"
            )
        if kind is Mapping and sample.keys() != first.keys():
            raise ArgumentError(f"samples: expected the keys {list(first)}, like the first, got {list(sample)} at {i}")
    if isinstance(ragged, Collection):
        known = list(first) if kind is Mapping else list(range(len(first))) if kind == (tuple, list) else []
        if unknown := [key for key in ragged if key not in known]:
            raise ArgumentError(f"ragged: expected some of {known}, the entries of a sample, got {unknown}")

    def part(key: Any, values: Sequence[Any]) -> Any:
        return collate(values, key in ragged if isinstance(ragged, Collection) else ragged)

    if isinstance(first, Mapping):
        return {key: part(key, [sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        if len({len(sample) for sample in samples}) > 1:
            raise ArgumentError(f"samples: expected equal numbers of entries, got {[len(s) for s in samples]}")
        parts = [part(i, list(column)) for i, column in enumerate(zip(*samples))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if type(first).__module__ == "numpy" and hasattr(first, "shape") and first.shape:
        return collate([torch.from_numpy(sample) for sample in samples], ragged)
    if isinstance(first, Tensor) and first.dim() and ragged is not False:
        differ = len({sample.shape for sample in samples}) > 1
        if differ or ragged is True:
            return Ragged.from_components(list(samples), ragged_dims=None if differ else [1])
    return default_collate(list(samples))


def to_packed(x: Ragged) -> PackedSequence:
    """Convert the sequences to the form that torch's recurrent modules take.

    Args:
        x: (B, *, ...), with sequences of at least one entry.

    Returns:
        The ``PackedSequence``; `from_packed` restores the order of the batch.

    Raises:
        ValueError: a ragged dim other than dim 1.
        RuntimeError: a sequence without entries, as in torch.
    """
    if x.ragged_dims != (1,):
        raise ValueError(f"to_packed: expected dim 1 as the only ragged one, got {x.summary()}")
    return pack_sequence(x.components(), enforce_sorted=False)


def from_packed(packed: PackedSequence) -> Ragged:
    """The sequences of a ``PackedSequence``, in the order of the batch.

    Args:
        packed: as ``nn.LSTM`` and similar modules return it.

    Returns:
        (B, *, ...).

    Raises:
        TypeError: not a ``PackedSequence``.
    """
    if not isinstance(packed, PackedSequence):
        raise TypeError(f"packed: expected a PackedSequence, got {type(packed).__name__}")
    return Ragged.from_components(unpack_sequence(packed), ragged_dims=[1])
