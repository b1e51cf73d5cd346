"""Samples of scatter_reduce and index_reduce."""

from __future__ import annotations

from torch import Tensor

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by

_PLACES = [[0, 2, 0], [0, 2, 1], [0, 0, 1]]


def _zeros(x: Tensor, *places: tuple[int, ...]) -> Tensor:
    for place in places:
        x[place] = 0
    return x


samples_for("aten::scatter_reduce.two")(
    drawn_by(
        lambda draw, index: (draw(4, 3), 0, index(_PLACES), _zeros(draw(3, 3), (0, 0), (1, 0)), "prod"),
        lambda draw, index: (
            draw(4, 3),
            0,
            index(_PLACES),
            _zeros(draw(4, 3), (0, 1)),
            "prod",
            {"include_self": False},
        ),
        lambda draw, index: (draw(4), 0, index([1, 1, 3]), draw(3), "sum", {"include_self": False}),
        lambda draw, index: (draw(2, 3), 1, index([[0, 0], [2, 0]]), draw(2, 2), "mean"),
        lambda draw, index: (draw(2, 3), -1, index([[0, 0], [2, 0]]), draw(3, 2), "mean", {"include_self": False}),
        lambda draw, index: (draw(4), 0, index([1, 1, 3]), 3 * draw(3), "amax"),
        lambda draw, index: (draw(4), 0, index([1, 1, 3]), draw(4), "amin", {"include_self": False}),
        lambda draw, index: (draw(), 0, index(0), draw(), "prod"),
    )
)


samples_for("aten::index_reduce")(
    drawn_by(
        lambda draw, index: (draw(3, 2), 0, index([0, 2, 0, 0]), _zeros(draw(4, 2), (0, 0), (2, 0)), "prod"),
        lambda draw, index: (draw(2, 3), 1, index([1, 1]), _zeros(draw(2, 2), (0, 0)), "prod", {"include_self": False}),
        lambda draw, index: (draw(2, 3), -1, index([0, 2, 0]), draw(2, 3), "mean"),
        lambda draw, index: (draw(4), 0, index([1, 1, 3]), 3 * draw(3), "amax"),
        lambda draw, index: (draw(4), 0, index([1, 1, 3]), draw(3), "amin", {"include_self": False}),
        lambda draw, index: (draw(), 0, index(0), draw(), "mean"),
    )
)
