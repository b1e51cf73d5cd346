"""Samples of indexing by masks."""

from __future__ import annotations

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by

samples_for("aten::masked_select")(
    drawn_by(
        lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]])),
        lambda draw, index: (draw(2, 1), index([True, False, True])),
        lambda draw, index: (draw(2, 3), index([False])),
        lambda draw, index: (draw(), index(True)),
    )
)


samples_for("aten::masked_scatter")(
    drawn_by(
        lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]]), draw(4)),
        lambda draw, index: (draw(2, 3), index([True, False, True]), draw(2, 3)),
        lambda draw, index: (draw(3), index([[True], [False]]), draw(5)),
    )
)


samples_for("aten::masked_scatter_backward")(
    drawn_by(
        lambda draw, index: (draw(2, 3), index([[True, False, True], [True, True, False]]), [4]),
        lambda draw, index: (draw(2, 3), index([[True, False, True], [False, False, True]]), [2, 3]),
        lambda draw, index: (draw(3), index([False, True, False]), [2, 2]),
    )
)
