"""Samples of the rules of indexing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import probe_for, samples_for

from ..indexing.embedding_bag import MAX, MEAN, SUM
from .drawing import distinct, drawn_by, drawn_for

# -- embedding ---------------------------------------------------------------------------------------------------------


drawn_for(
    "aten::embedding",
    lambda draw, index: (draw(4, 2), index([[0, 2], [0, 3]])),
    lambda draw, index: (draw(4, 2), index(1), 2),
    real_only=True,
)
drawn_for(
    "aten::embedding_dense_backward",
    lambda draw, index: (draw(2, 2, 2), index([[0, 2], [0, 3]]), 4, -1, False),
    lambda draw, index: (draw(2, 2, 2), index([[0, 2], [0, 3]]), 4, 2, True),
    lambda draw, index: (draw(2), index(1), 3, 0, False),
    real_only=True,
)


# -- embedding bag -----------------------------------------------------------------------------------------------------


aten = torch.ops.aten

_INDICES, _OFFSETS = [0, 2, 3, 2, 1], [0, 0, 2]  # the first bag is empty

_AT_THE_END = [0, 1, 3, 3, 2]  # the last row twice: otherwise PyTorch takes the frequency of another row


_forward = drawn_by(
    lambda draw, index: (draw(4, 2), index(_INDICES), index(_OFFSETS), False, SUM, False, draw(5), False, 2),
    lambda draw, index: (draw(4, 2), index(_INDICES), index([0, 2, 2, 5]), False, MEAN, False, None, True, 2),
    lambda draw, index: (draw(4, 2), index(_INDICES), index(_OFFSETS), False, MAX),
    real_only=True,
)


def _contiguous(name: str) -> Any:
    """The operator on contiguous indices, as it misreads others; only the first result of the forward."""
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
drawn_for(
    "aten::_embedding_bag_per_sample_weights_backward",
    lambda draw, index: (draw(3, 2), draw(4, 2), index(_INDICES), index(_OFFSETS), index([1, 1, 2, 2, 2]), SUM, 2),
    real_only=True,
)
probe_for("aten::_embedding_bag_backward")(_contiguous("_embedding_bag_backward"))
probe_for("aten::_embedding_bag_dense_backward")(_contiguous("_embedding_bag_dense_backward"))
probe_for("aten::_embedding_bag_per_sample_weights_backward")(_contiguous("_embedding_bag_per_sample_weights_backward"))


for _name in ("_embedding_bag", "_embedding_bag_forward_only"):
    samples_for(f"aten::{_name}")(_forward)
    probe_for(f"aten::{_name}")(_contiguous(_name))


# -- index -------------------------------------------------------------------------------------------------------------


_INDEX = drawn_by(
    lambda draw, index: (draw(3, 4), [index([0, 2, 0])]),
    lambda draw, index: (draw(2, 3, 2), [index([1, -1]), None, index([[0], [1]])]),
    lambda draw, index: (draw(3), [index(1)]),
)


_UNSAFE = drawn_by(
    lambda draw, index: (draw(3, 4), [index([0, 2, 0])]),
    lambda draw, index: (draw(2, 3, 2), [index([1, 0]), None, index([[0], [1]])]),
)


_PUT = drawn_by(
    lambda draw, index: (draw(3, 4), [index([0, 2])], draw(2, 4)),
    lambda draw, index: (draw(3, 4), [None, index([1, -1, 1])], draw(3, 1), True),
    lambda draw, index: (draw(3), [index(1)], draw()),
)
samples_for("aten::index.Tensor")(_INDEX)
samples_for("aten::_unsafe_index.Tensor")(_UNSAFE)
samples_for("aten::index_put", "aten::_index_put_impl")(_PUT)
drawn_for(
    "aten::_unsafe_index_put",
    lambda draw, index: (draw(3, 4), [index([0, 2])], draw(2, 4)),
    lambda draw, index: (draw(3, 4), [None, index([1, 3, 1])], draw(3, 1), True),
)
drawn_for(
    "aten::_unsafe_masked_index",
    lambda draw, index: (draw(4), index([True, False, True]), [index([0, 9, 0])], 2.5),
    lambda draw, index: (draw(3, 4), index([[True], [False]]), [index([[2], [9]]), index([[0, 1, 1]])], 2.5),
)
drawn_for(
    "aten::_unsafe_masked_index_put_accumulate",
    lambda draw, index: (draw(4), index([True, False, True]), [index([0, 9, 0])], draw(3)),
    lambda draw, index: (draw(3, 4), index([[True], [False]]), [index([[2], [9]]), index([[0, 1, 1]])], draw(2, 3)),
)


# -- masked ------------------------------------------------------------------------------------------------------------


drawn_for(
    "aten::masked_select",
    lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]])),
    lambda draw, index: (draw(2, 1), index([True, False, True])),
    lambda draw, index: (draw(2, 3), index([False])),
    lambda draw, index: (draw(), index(True)),
)
drawn_for(
    "aten::masked_scatter",
    lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]]), draw(4)),
    lambda draw, index: (draw(2, 3), index([True, False, True]), draw(2, 3)),
    lambda draw, index: (draw(3), index([[True], [False]]), draw(5)),
)
drawn_for(
    "aten::masked_scatter_backward",
    lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]]), [4]),
    lambda draw, index: (draw(2, 3), index([[True, False, True], [False, False, True]]), [2, 3]),
    lambda draw, index: (draw(3), index([False, True, False]), [2, 2]),
)


# -- scatter -----------------------------------------------------------------------------------------------------------


drawn_for(
    "aten::scatter.src",
    lambda draw, index: (draw(3, 4), 0, index([[0, 1, 2, 0], [2, 0, 1, 1]]), draw(2, 4)),
    lambda draw, index: (draw(3, 4), 1, index([[3, 1], [0, 2]]), draw(3, 5)),
    lambda draw, index: (draw(), 0, index(0), draw()),
    lambda draw, index: (draw(3), 0, index([]), draw(2)),
)
drawn_for(
    "aten::scatter.value",
    lambda draw, index: (draw(3, 4), 1, index([[0, 2], [1, 1]]), 2.5),
    lambda draw, index: (draw(), 0, index([0]), 2.5),
)
drawn_for(
    "aten::scatter_add",
    lambda draw, index: (draw(3, 4), 0, index([[0, 0, 2, 0], [0, 0, 1, 1]]), draw(2, 4)),
    lambda draw, index: (draw(3, 4), -1, index([[3, 3], [0, 2]]), draw(3, 5)),
    lambda draw, index: (draw(), 0, index(0), draw()),
    lambda draw, index: (draw(3), 0, index([0, 0]), draw(2)),
)
drawn_for(
    "aten::gather",
    lambda draw, index: (draw(3, 4), 0, index([[0, 0, 2], [0, 1, 2]])),
    lambda draw, index: (draw(3, 2), -1, index([[1, 1, 0]])),
    lambda draw, index: (draw(), 0, index(0)),
    lambda draw, index: (draw(3), 0, index([])),
)
drawn_for(
    "aten::take",
    lambda draw, index: (draw(2, 3), index([[0, -1], [5, 2]])),
    lambda draw, index: (draw(2, 3).mT, index(4)),
    lambda draw, index: (draw(), index([0, 0])),
    lambda draw, index: (draw(2), index([])),
)
drawn_for(
    "aten::put",
    lambda draw, index: (draw(2, 3), index([[0, -1]]), draw(2)),
    lambda draw, index: (draw(2, 3), index([4, 4, -2]), draw(3, 1), True),
    lambda draw, index: (draw(), index(0), draw()),
)


# -- scatter reduce ----------------------------------------------------------------------------------------------------


_PLACES = [[0, 2, 0], [0, 2, 1], [0, 0, 1]]


def _zeros(x: Tensor, *places: tuple[int, ...]) -> Tensor:
    for place in places:
        x[place] = 0
    return x


drawn_for(
    "aten::scatter_reduce.two",
    lambda draw, index: (draw(4, 3), 0, index(_PLACES), _zeros(draw(3, 3), (0, 0), (1, 0)), "prod"),
    lambda draw, index: (draw(4, 3), 0, index(_PLACES), _zeros(draw(4, 3), (0, 1)), "prod", {"include_self": False}),
    lambda draw, index: (draw(4), 0, index([1, 1, 3]), draw(3), "sum", {"include_self": False}),
    lambda draw, index: (draw(2, 3), 1, index([[0, 0], [2, 0]]), draw(2, 2), "mean"),
    lambda draw, index: (draw(2, 3), -1, index([[0, 0], [2, 0]]), draw(3, 2), "mean", {"include_self": False}),
    lambda draw, index: (draw(4), 0, index([1, 1, 3]), 3 * draw(3), "amax"),
    lambda draw, index: (draw(4), 0, index([1, 1, 3]), draw(4), "amin", {"include_self": False}),
    lambda draw, index: (draw(), 0, index(0), draw(), "prod"),
)
drawn_for(
    "aten::index_reduce",
    lambda draw, index: (draw(3, 2), 0, index([0, 2, 0, 0]), _zeros(draw(4, 2), (0, 0), (2, 0)), "prod"),
    lambda draw, index: (draw(2, 3), 1, index([1, 1]), _zeros(draw(2, 2), (0, 0)), "prod", {"include_self": False}),
    lambda draw, index: (draw(2, 3), -1, index([0, 2, 0]), draw(2, 3), "mean"),
    lambda draw, index: (draw(4), 0, index([1, 1, 3]), 3 * draw(3), "amax"),
    lambda draw, index: (draw(4), 0, index([1, 1, 3]), draw(3), "amin", {"include_self": False}),
    lambda draw, index: (draw(), 0, index(0), draw(), "mean"),
)


# -- slices ------------------------------------------------------------------------------------------------------------


drawn_for(
    "aten::index_select",
    lambda draw, index: (draw(3, 4), 0, index([0, 2, 0])),
    lambda draw, index: (draw(2, 3), -1, index([1])),
    lambda draw, index: (draw(), 0, index([0])),
    lambda draw, index: (draw(2, 3), 1, index([])),
)
drawn_for(
    "aten::index_add",
    lambda draw, index: (draw(3, 4), 0, index([0, 2, 0]), draw(3, 4)),
    lambda draw, index: (draw(2, 3), -1, index([1]), draw(2, 1), {"alpha": -3}),
    lambda draw, index: (draw(), 0, index([0]), draw()),
    lambda draw, index: (draw(2, 3), 1, index([]), draw(2, 0)),
)
drawn_for(
    "aten::index_copy",
    lambda draw, index: (draw(3, 4), 0, index([0, 2]), draw(2, 4)),
    lambda draw, index: (draw(2, 3), -1, index([1]), draw(2, 1)),
    lambda draw, index: (draw(), 0, index([0]), draw()),
)
drawn_for(
    "aten::index_fill.int_Scalar",
    lambda draw, index: (draw(3, 4), 1, index([0, -1]), 2.5),
    lambda draw, index: (draw(), 0, index([0]), 2.5),
)
drawn_for(
    "aten::index_fill.int_Tensor",
    lambda draw, index: (draw(3, 4), 1, index([0, -1, 3]), draw()),
    lambda draw, index: (draw(3, 2), 0, index(1), draw()),
    lambda draw, index: (draw(3, 2), 0, index([]), draw()),
)
probe_for("aten::index_fill.int_Tensor")(
    lambda self, dim, index, value: torch.index_fill(self + 0 * value, dim, index, value)
)
