"""Samples of the rules of operators on shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from .drawing import distinct, drawn_by, drawn_for

# -- cross -------------------------------------------------------------------------------------------------------------


drawn_for(
    "aten::linalg_cross",
    lambda draw, index: (draw(2, 3), draw(2, 3)),
    lambda draw, index: (draw(3, 2), draw(3, 1), {"dim": -2}),
)


# -- joining -----------------------------------------------------------------------------------------------------------


aten = torch.ops.aten


def _mixed(draw: Any, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of which the first is real, even if the others are complex."""
    first, *rest = [draw(*shape) for shape in shapes]
    return [first.real.clone(), *rest]


drawn_for(
    "aten::cat",
    lambda draw, index: ([draw(2, 3), draw(1, 3)],),
    lambda draw, index: (_mixed(draw, (2, 1), (0,), (2, 3)), -1),
    lambda draw, index: ([draw(2), draw(0)],),
)
drawn_for(
    "aten::stack", lambda draw, index: ([draw(2, 3), draw(2, 3)], -1), lambda draw, index: (_mixed(draw, (), ()),)
)
drawn_for(
    "aten::block_diag",
    lambda draw, index: ([draw(2, 1), draw(2), draw()],),
    lambda draw, index: (_mixed(draw, (1, 2), (2, 0), (1, 1)),),
)
drawn_for("aten::unsafe_split.Tensor", lambda draw, index: (draw(3, 2), 2), lambda draw, index: (draw(2, 3), 1, -1))
drawn_for(
    "aten::unsafe_split_with_sizes",
    lambda draw, index: (draw(3, 2), [2, 0, 1]),
    lambda draw, index: (draw(2, 3), [1, 2], -1),
)
probe_for("aten::unsafe_split_with_sizes")(
    lambda self, *split: [x.clone() for x in torch.ops.aten.unsafe_split_with_sizes(self, *split)]
)


# -- padding -----------------------------------------------------------------------------------------------------------


def _pads(name: str, padding: list[int], *shapes: tuple[int, ...]) -> None:
    """Samples of an operator that pads by copies, and of its backward operator."""
    grown = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(reversed(shapes[0][-len(padding) // 2 :]))]

    def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: -len(grown)], *reversed(grown))

    samples_for(f"aten::{name}")(drawn_by(*[lambda draw, index, s=s: (draw(*s), padding) for s in shapes]))
    samples_for(f"aten::{name}_backward")(
        drawn_by(*[lambda draw, index, s=s: (draw(*padded(s)), draw(*s), padding) for s in shapes])
    )


drawn_for(
    "aten::constant_pad_nd",
    lambda draw, index: (draw(2, 3), [1, 2, 0, 1], 2.5),
    lambda draw, index: (draw(2, 4), [-1, 2]),
    lambda draw, index: (draw(2, 3), [-1, -1, -1, 0]),
)
_pads("reflection_pad1d", [2, 1], (2, 1, 3), (1, 3))
_pads("reflection_pad2d", [1, 0, 0, 1], (1, 1, 2, 3), (2, 2, 3))
_pads("reflection_pad3d", [1, 0, 0, 1, 0, 0], (1, 1, 1, 2, 2), (1, 1, 2, 2))
_pads("replication_pad1d", [2, 1], (2, 1, 3), (1, 3))
_pads("replication_pad2d", [1, 0, 0, 2], (1, 1, 2, 3), (2, 2, 3))
_pads("replication_pad3d", [1, 0, 0, 1, 1, 0], (1, 1, 1, 2, 2), (1, 1, 2, 2))


# -- rearrangement -----------------------------------------------------------------------------------------------------


drawn_for("aten::roll", lambda draw, index: (draw(3, 4), [1, -2], [0, 1]), lambda draw, index: (draw(2, 3), [2]))
drawn_for("aten::flip", lambda draw, index: (draw(3, 4), [0, -1]), lambda draw, index: (draw(3), [-1]))
drawn_for("aten::rot90", lambda draw, index: (draw(3, 4), 1, [0, 1]), lambda draw, index: (draw(2, 3, 2), 3, [2, 0]))
drawn_for("aten::tril", lambda draw, index: (draw(3, 4),), lambda draw, index: (draw(2, 3, 2), -1))
drawn_for("aten::triu", lambda draw, index: (draw(3, 4),), lambda draw, index: (draw(2, 3, 2), 1))
drawn_for("aten::diag_embed", lambda draw, index: (draw(2, 3),), lambda draw, index: (draw(2, 2), -1, 0, 2))
drawn_for(
    "aten::repeat",
    lambda draw, index: (draw(2, 3), [2, 1, 2]),
    lambda draw, index: (draw(2), [0]),
    lambda draw, index: (draw(), []),
    lambda draw, index: (draw(), [3]),
)
drawn_for("aten::channel_shuffle", lambda draw, index: (draw(1, 6, 2), 2))
drawn_for("aten::pixel_shuffle", lambda draw, index: (draw(2, 4, 1, 2), 2))
drawn_for("aten::pixel_unshuffle", lambda draw, index: (draw(2, 2, 4), 2))
drawn_for("aten::narrow_copy", lambda draw, index: (draw(3, 4), 1, 1, 2), lambda draw, index: (draw(3, 2), -2, -2, 2))
drawn_for(
    ("aten::_reshape_copy", "aten::_unsafe_view"),
    lambda draw, index: (draw(2, 3), [3, -1]),
    lambda draw, index: (draw(), [1]),
)
probe_for("aten::_unsafe_view")(lambda self, size: torch.ops.aten._unsafe_view(self.contiguous(), size))


# -- sequences ---------------------------------------------------------------------------------------------------------


@samples_for("aten::_pack_padded_sequence")
def packed(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    lengths = torch.tensor([3, 1], device="cpu")
    yield Sample(distinct(4, 2, 2, dtype=dtype, device=device), lengths, False)
    yield Sample(distinct(2, 3, dtype=dtype, device=device), lengths, True)


probe_for("aten::_pack_padded_sequence")(lambda *args: torch.ops.aten._pack_padded_sequence(*args)[0])


# -- views -------------------------------------------------------------------------------------------------------------


drawn_for(
    "aten::select_backward", lambda draw, index: (draw(3), [2, 3], 0, -1), lambda draw, index: (draw(), [3], 0, 1)
)
drawn_for(
    "aten::slice_backward",
    lambda draw, index: (draw(2, 2), [2, 4], 1, 1, 4, 2),
    lambda draw, index: (draw(2), [4], -1, -3, -1, 1),
)
drawn_for(
    "aten::diagonal_backward",
    lambda draw, index: (draw(2), [3, 2], 0, 0, 1),
    lambda draw, index: (draw(3, 2), [2, 3, 3], 1, 0, 2),
)
drawn_for(
    "aten::unfold_backward",
    lambda draw, index: (draw(3, 3), [5], 0, 3, 1),
    lambda draw, index: (draw(2, 2, 2), [2, 5], 1, 2, 3),
)
drawn_for(
    "aten::select_scatter",
    lambda draw, index: (draw(2, 3), draw(2), 1, -1),
    lambda draw, index: (draw(3), draw(), 0, 1),
)
drawn_for(
    "aten::slice_scatter",
    lambda draw, index: (draw(2, 4), draw(2, 2), 1, None, None, 2),
    lambda draw, index: (draw(3, 2), draw(1, 2), 0, 1, 2),
)
drawn_for(
    "aten::diagonal_scatter",
    lambda draw, index: (draw(3, 2), draw(2)),
    lambda draw, index: (draw(2, 2, 3), draw(2, 2), 1, 0, 2),
)
drawn_for(
    "aten::as_strided_scatter",
    lambda draw, index: (draw(3, 4), draw(2, 2), [2, 2], [1, 4], 1),
    lambda draw, index: (draw(6), draw(3), [3], [2]),
)
probe_for("aten::as_strided_scatter")(lambda self, *more: torch.ops.aten.as_strided_scatter(self.contiguous(), *more))
