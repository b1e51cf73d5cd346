"""Samples of entries moved and repeated."""

from __future__ import annotations

import torch

from torch_manualgrad.core.rule import probe_for, samples_for

from ..drawing import drawn_by

aten = torch.ops.aten


samples_for("aten::roll")(
    drawn_by(
        lambda draw, index: (draw(3, 4), [1, -2], [0, 1]),
        lambda draw, index: (draw(2, 3), [2]),
    )
)


samples_for("aten::flip")(
    drawn_by(
        lambda draw, index: (draw(3, 4), [0, -1]),
        lambda draw, index: (draw(3), [-1]),
    )
)


samples_for("aten::rot90")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 1, [0, 1]),
        lambda draw, index: (draw(2, 3, 2), 3, [2, 0]),
    )
)


samples_for("aten::tril")(
    drawn_by(
        lambda draw, index: (draw(3, 4),),
        lambda draw, index: (draw(2, 3, 2), -1),
    )
)


samples_for("aten::triu")(
    drawn_by(
        lambda draw, index: (draw(3, 4),),
        lambda draw, index: (draw(2, 3, 2), 1),
    )
)


samples_for("aten::diag_embed")(
    drawn_by(
        lambda draw, index: (draw(2, 3),),
        lambda draw, index: (draw(2, 2), -1, 0, 2),
    )
)


samples_for("aten::repeat")(
    drawn_by(
        lambda draw, index: (draw(2, 3), [2, 1, 2]),
        lambda draw, index: (draw(2), [0]),
        lambda draw, index: (draw(), []),
        lambda draw, index: (draw(), [3]),
    )
)


samples_for("aten::channel_shuffle")(drawn_by(lambda draw, index: (draw(1, 6, 2), 2)))
samples_for("aten::pixel_shuffle")(drawn_by(lambda draw, index: (draw(2, 4, 1, 2), 2)))
samples_for("aten::pixel_unshuffle")(drawn_by(lambda draw, index: (draw(2, 2, 4), 2)))
samples_for("aten::narrow_copy")(
    drawn_by(
        lambda draw, index: (draw(3, 4), 1, 1, 2),
        lambda draw, index: (draw(3, 2), -2, -2, 2),
    )
)


samples_for("aten::_reshape_copy", "aten::_unsafe_view")(
    drawn_by(
        lambda draw, index: (draw(2, 3), [3, -1]),
        lambda draw, index: (draw(), [1]),
    )
)


probe_for("aten::_unsafe_view")(lambda self, size: torch.ops.aten._unsafe_view(self.contiguous(), size))
