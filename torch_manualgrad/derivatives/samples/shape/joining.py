"""Samples of concatenations and splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import probe_for, samples_for

from ..drawing import drawn_by

aten = torch.ops.aten


def _mixed(draw: Any, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The first real, also among complex ones."""
    first, *rest = [draw(*shape) for shape in shapes]
    return [first.real.clone(), *rest]


samples_for("aten::cat")(
    drawn_by(
        lambda draw, index: ([draw(2, 3), draw(1, 3)],),
        lambda draw, index: (_mixed(draw, (2, 1), (0,), (2, 3)), -1),
        lambda draw, index: ([draw(2), draw(0)],),
    )
)


samples_for("aten::stack")(
    drawn_by(
        lambda draw, index: ([draw(2, 3), draw(2, 3)], -1),
        lambda draw, index: (_mixed(draw, (), ()),),
    )
)


samples_for("aten::block_diag")(
    drawn_by(
        lambda draw, index: ([draw(2, 1), draw(2), draw()],),
        lambda draw, index: (_mixed(draw, (1, 2), (2, 0), (1, 1)),),
    )
)


samples_for("aten::unsafe_split.Tensor")(
    drawn_by(
        lambda draw, index: (draw(3, 2), 2),
        lambda draw, index: (draw(2, 3), 1, -1),
    )
)


samples_for("aten::unsafe_split_with_sizes")(
    drawn_by(
        lambda draw, index: (draw(3, 2), [2, 0, 1]),
        lambda draw, index: (draw(2, 3), [1, 2], -1),
    )
)


probe_for("aten::unsafe_split_with_sizes")(
    lambda self, *split: [x.clone() for x in torch.ops.aten.unsafe_split_with_sizes(self, *split)]
)
