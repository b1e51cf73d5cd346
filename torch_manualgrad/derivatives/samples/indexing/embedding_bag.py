"""Samples of embedding_bag and its backward operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import probe_for, samples_for

from ...indexing.embedding_bag import MAX, MEAN, SUM
from ..drawing import distinct, drawn_by

aten = torch.ops.aten

_INDICES, _OFFSETS = [0, 2, 3, 2, 1], [0, 0, 2]  # the first bag is empty

_AT_THE_END = [0, 1, 3, 3, 2]  # the last row twice: PyTorch takes the frequency of another row otherwise


_forward = drawn_by(
    lambda draw, index: (draw(4, 2), index(_INDICES), index(_OFFSETS), False, SUM, False, draw(5), False, 2),
    lambda draw, index: (draw(4, 2), index(_INDICES), index([0, 2, 2, 5]), False, MEAN, False, None, True, 2),
    lambda draw, index: (draw(4, 2), index(_INDICES), index(_OFFSETS), False, MAX),
    real_only=True,
)


def _contiguous(name: str) -> Any:
    """The operator on contiguous indices, as it reads others wrongly; only the first result of the forward."""
    operator = getattr(aten, name)

    def probe(*args: Any) -> Any:
        args = tuple(
            torch.stack(list(x)) if isinstance(x, Tensor) and not x.is_floating_point() and x.dim() == 1 else x
            for x in args
        )
        found = operator(*args)
        return found[0] if isinstance(found, tuple) else found

    return probe


def _backward_samples(with_offsets: bool) -> Any:
    def call(draw: Any, index: Any, mode: int, scale: bool, weighted: bool, padding_idx: int) -> tuple[Any, ...]:
        weight, indices, offsets = distinct(4, 2, dtype=torch.float64), index(_AT_THE_END), index(_OFFSETS)
        _, _, size, maxima = aten._embedding_bag(
            weight.to(indices.device), indices, offsets, False, mode, padding_idx=padding_idx
        )
        bag = index([1, 1, 2, 2, 2])
        places = (indices, offsets, bag) if with_offsets else (indices, bag)
        sparse = (False,) if with_offsets else ()
        weights = draw(5) if weighted else None
        return draw(3, 2), *places, size, maxima, 4, scale, mode, *sparse, weights, padding_idx

    return drawn_by(
        lambda draw, index: call(draw, index, SUM, False, True, 2),
        lambda draw, index: call(draw, index, SUM, True, False, -1),
        lambda draw, index: call(draw, index, MEAN, False, False, 2),
        lambda draw, index: call(draw, index, MAX, False, False, -1),
        real_only=True,
    )


samples_for("aten::_embedding_bag_backward")(_backward_samples(with_offsets=True))
samples_for("aten::_embedding_bag_dense_backward")(_backward_samples(with_offsets=False))
samples_for("aten::_embedding_bag_per_sample_weights_backward")(
    drawn_by(
        lambda draw, index: (draw(3, 2), draw(4, 2), index(_INDICES), index(_OFFSETS), index([1, 1, 2, 2, 2]), SUM, 2),
        real_only=True,
    )
)


probe_for("aten::_embedding_bag_backward")(_contiguous("_embedding_bag_backward"))
probe_for("aten::_embedding_bag_dense_backward")(_contiguous("_embedding_bag_dense_backward"))
probe_for("aten::_embedding_bag_per_sample_weights_backward")(_contiguous("_embedding_bag_per_sample_weights_backward"))


for _name in ("_embedding_bag", "_embedding_bag_forward_only"):
    samples_for(f"aten::{_name}")(_forward)
    probe_for(f"aten::{_name}")(_contiguous(_name))
