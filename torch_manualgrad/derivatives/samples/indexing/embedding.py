"""Samples of embedding and its backward operator."""

from __future__ import annotations

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by

samples_for("aten::embedding")(
    drawn_by(
        lambda draw, index: (draw(4, 2), index([[0, 2], [0, 3]])),
        lambda draw, index: (draw(4, 2), index(1), 2),
        real_only=True,
    )
)


samples_for("aten::embedding_dense_backward")(
    drawn_by(
        lambda draw, index: (draw(2, 2, 2), index([[0, 2], [0, 3]]), 4, -1, False),
        lambda draw, index: (draw(2, 2, 2), index([[0, 2], [0, 3]]), 4, 2, True),
        lambda draw, index: (draw(2), index(1), 3, 0, False),
        real_only=True,
    )
)
