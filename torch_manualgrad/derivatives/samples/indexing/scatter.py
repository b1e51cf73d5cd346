"""Samples of gather, scatter and their kin."""

from __future__ import annotations

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by

samples_for("aten::scatter.src")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 0, index([[0, 1, 2, 0], [2, 0, 1, 1]]), draw(2, 4)),
        lambda draw, index: (draw(3, 4), 1, index([[3, 1], [0, 2]]), draw(3, 5)),
        lambda draw, index: (draw(), 0, index(0), draw()),
        lambda draw, index: (draw(3), 0, index([]), draw(2)),
    )
)


samples_for("aten::scatter.value")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 1, index([[0, 2], [1, 1]]), 2.5),
        lambda draw, index: (draw(), 0, index([0]), 2.5),
    )
)


samples_for("aten::scatter_add")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 0, index([[0, 0, 2, 0], [0, 0, 1, 1]]), draw(2, 4)),
        lambda draw, index: (draw(3, 4), -1, index([[3, 3], [0, 2]]), draw(3, 5)),
        lambda draw, index: (draw(), 0, index(0), draw()),
        lambda draw, index: (draw(3), 0, index([0, 0]), draw(2)),
    )
)


samples_for("aten::gather")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 0, index([[0, 0, 2], [0, 1, 2]])),
        lambda draw, index: (draw(3, 2), -1, index([[1, 1, 0]])),
        lambda draw, index: (draw(), 0, index(0)),
        lambda draw, index: (draw(3), 0, index([])),
    )
)


samples_for("aten::take")(
    drawn_by(
        lambda draw, index: (draw(2, 3), index([[0, -1], [5, 2]])),
        lambda draw, index: (draw(2, 3).mT, index(4)),
        lambda draw, index: (draw(), index([0, 0])),
        lambda draw, index: (draw(2), index([])),
    )
)


samples_for("aten::put")(
    drawn_by(
        lambda draw, index: (draw(2, 3), index([[0, -1]]), draw(2)),
        lambda draw, index: (draw(2, 3), index([4, 4, -2]), draw(3, 1), True),
        lambda draw, index: (draw(), index(0), draw()),
    )
)
