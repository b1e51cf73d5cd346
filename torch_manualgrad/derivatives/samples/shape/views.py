"""Samples of the backwards of views, and of scatters of views."""

from __future__ import annotations

import torch

from torch_manualgrad.core.rule import probe_for, samples_for

from ..drawing import drawn_by

aten = torch.ops.aten


samples_for("aten::select_backward")(
    drawn_by(
        lambda draw, index: (draw(3), [2, 3], 0, -1),
        lambda draw, index: (draw(), [3], 0, 1),
    )
)


samples_for("aten::slice_backward")(
    drawn_by(
        lambda draw, index: (draw(2, 2), [2, 4], 1, 1, 4, 2),
        lambda draw, index: (draw(2), [4], -1, -3, -1, 1),
    )
)


samples_for("aten::diagonal_backward")(
    drawn_by(
        lambda draw, index: (draw(2), [3, 2], 0, 0, 1),
        lambda draw, index: (draw(3, 2), [2, 3, 3], 1, 0, 2),
    )
)


samples_for("aten::unfold_backward")(
    drawn_by(
        lambda draw, index: (draw(3, 3), [5], 0, 3, 1),
        lambda draw, index: (draw(2, 2, 2), [2, 5], 1, 2, 3),
    )
)


samples_for("aten::select_scatter")(
    drawn_by(
        lambda draw, index: (draw(2, 3), draw(2), 1, -1),
        lambda draw, index: (draw(3), draw(), 0, 1),
    )
)


samples_for("aten::slice_scatter")(
    drawn_by(
        lambda draw, index: (draw(2, 4), draw(2, 2), 1, None, None, 2),
        lambda draw, index: (draw(3, 2), draw(1, 2), 0, 1, 2),
    )
)


samples_for("aten::diagonal_scatter")(
    drawn_by(
        lambda draw, index: (draw(3, 2), draw(2)),
        lambda draw, index: (draw(2, 2, 3), draw(2, 2), 1, 0, 2),
    )
)


samples_for("aten::as_strided_scatter")(
    drawn_by(
        lambda draw, index: (draw(3, 4), draw(2, 2), [2, 2], [1, 4], 1),
        lambda draw, index: (draw(6), draw(3), [3], [2]),
    )
)


probe_for("aten::as_strided_scatter")(lambda self, *more: torch.ops.aten.as_strided_scatter(self.contiguous(), *more))
