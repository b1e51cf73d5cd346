"""Samples of linalg_cross."""

from __future__ import annotations

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by

samples_for("aten::linalg_cross")(
    drawn_by(
        lambda draw, index: (draw(2, 3), draw(2, 3)),
        lambda draw, index: (draw(3, 2), draw(3, 1), {"dim": -2}),
    )
)
