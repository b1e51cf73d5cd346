"""Samples of slices by an index."""

from __future__ import annotations

import torch

from torch_manualgrad.core.rule import probe_for, samples_for

from ..drawing import drawn_by

samples_for("aten::index_select")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 0, index([0, 2, 0])),
        lambda draw, index: (draw(2, 3), -1, index([1])),
        lambda draw, index: (draw(), 0, index([0])),
        lambda draw, index: (draw(2, 3), 1, index([])),
    )
)


samples_for("aten::index_add")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 0, index([0, 2, 0]), draw(3, 4)),
        lambda draw, index: (draw(2, 3), -1, index([1]), draw(2, 1), {"alpha": -3}),
        lambda draw, index: (draw(), 0, index([0]), draw()),
        lambda draw, index: (draw(2, 3), 1, index([]), draw(2, 0)),
    )
)


samples_for("aten::index_copy")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 0, index([0, 2]), draw(2, 4)),
        lambda draw, index: (draw(2, 3), -1, index([1]), draw(2, 1)),
        lambda draw, index: (draw(), 0, index([0]), draw()),
    )
)


samples_for("aten::index_fill.int_Scalar")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 1, index([0, -1]), 2.5),
        lambda draw, index: (draw(), 0, index([0]), 2.5),
    )
)


samples_for("aten::index_fill.int_Tensor")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 1, index([0, -1, 3]), draw()),
        lambda draw, index: (draw(3, 2), 0, index(1), draw()),
        lambda draw, index: (draw(3, 2), 0, index([]), draw()),
    )
)


probe_for("aten::index_fill.int_Tensor")(
    lambda self, dim, index, value: torch.index_fill(self + 0 * value, dim, index, value)
)
