"""Samples of padding."""

from __future__ import annotations

from torch_manualgrad.core.rule import samples_for

from ..drawing import drawn_by


def _pads(name: str, padding: list[int], *shapes: tuple[int, ...]) -> None:
    """Samples of an operator that pads by copies, and of its backward operator."""
    grown = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(reversed(shapes[0][-len(padding) // 2 :]))]

    def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: -len(grown)], *reversed(grown))

    samples_for(f"aten::{name}")(drawn_by(*[lambda draw, index, s=s: (draw(*s), padding) for s in shapes]))
    samples_for(f"aten::{name}_backward")(
        drawn_by(*[lambda draw, index, s=s: (draw(*padded(s)), draw(*s), padding) for s in shapes])
    )


samples_for("aten::constant_pad_nd")(
    drawn_by(
        lambda draw, index: (draw(2, 3), [1, 2, 0, 1], 2.5),
        lambda draw, index: (draw(2, 4), [-1, 2]),
        lambda draw, index: (draw(2, 3), [-1, -1, -1, 0]),
    )
)
_pads("reflection_pad1d", [2, 1], (2, 1, 3), (1, 3))
_pads("reflection_pad2d", [1, 0, 0, 1], (1, 1, 2, 3), (2, 2, 3))
_pads("reflection_pad3d", [1, 0, 0, 1, 0, 0], (1, 1, 1, 2, 2), (1, 1, 2, 2))
_pads("replication_pad1d", [2, 1], (2, 1, 3), (1, 3))
_pads("replication_pad2d", [1, 0, 0, 2], (1, 1, 2, 3), (2, 2, 3))
_pads("replication_pad3d", [1, 0, 0, 1, 1, 0], (1, 1, 1, 2, 2), (1, 1, 2, 2))
