"""Samples of indexing by tensors."""

from __future__ import annotations

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by

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
samples_for("aten::_unsafe_index_put")(
    drawn_by(
        lambda draw, index: (draw(3, 4), [index([0, 2])], draw(2, 4)),
        lambda draw, index: (draw(3, 4), [None, index([1, 3, 1])], draw(3, 1), True),
    )
)


samples_for("aten::_unsafe_masked_index")(
    drawn_by(
        lambda draw, index: (draw(4), index([True, False, True]), [index([0, 9, 0])], 2.5),
        lambda draw, index: (draw(3, 4), index([[True], [False]]), [index([[2], [9]]), index([[0, 1, 1]])], 2.5),
    )
)


samples_for("aten::_unsafe_masked_index_put_accumulate")(
    drawn_by(
        lambda draw, index: (draw(4), index([True, False, True]), [index([0, 9, 0])], draw(3)),
        lambda draw, index: (draw(3, 4), index([[True], [False]]), [index([[2], [9]]), index([[0, 1, 1]])], draw(2, 3)),
    )
)
