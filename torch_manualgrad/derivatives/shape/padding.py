"""Padding with a constant, with reflections or with replicas of the border, and the backwards of the latter two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in, operator, rule

from .common import samples

__all__ = ["constant_pad_nd_backward"]


@formula
def constant_pad_nd_backward(grad: Tensor, pad: Sequence[int]) -> Tensor:
    """Cotangent of x, given that of x padded with a constant: without the padding, with zeros where x was cropped.

    Args:
        grad: cotangent of the result.
        pad: how many entries were added before and after, from the last dim on; negative where x was cropped.

    Returns:
        The shape of x.

    Note:
        Where not differentiable: nowhere; the operator is affine.

    References:
        ATen constant_pad_nd_backward.
    """
    return torch.constant_pad_nd(grad, [-n for n in pad], 0)


def _pair(name: str, padding: list[int], *shapes: tuple[int, ...]) -> None:
    """The rules of an operator that pads by copies, and of its backward, which sums over these."""
    pad, backward = operator(f"aten::{name}"), operator(f"aten::{name}_backward")
    grown = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(reversed(shapes[0][-len(padding) // 2 :]))]

    def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: -len(grown)], *reversed(grown))

    linear_in(
        f"aten::{name}",
        {"self": lambda grad, self, padding: backward(grad, self, padding)},
        samples=samples(*[lambda draw, index, s=s: (draw(*s), padding) for s in shapes]),
    )
    linear_in(
        f"aten::{name}_backward",
        {
            "grad_output": lambda grad, padding: pad(grad, padding),
            "self": lambda grad, self_sizes: grad.new_zeros(self_sizes),
        },
        samples=samples(*[lambda draw, index, s=s: (draw(*padded(s)), draw(*s), padding) for s in shapes]),
    )


rule(
    "aten::constant_pad_nd",
    vjp={"self": constant_pad_nd_backward},
    jvp={"result": lambda self_t, pad: torch.constant_pad_nd(self_t, pad, 0)},
    kind="linear",
    source="ATen derivatives.yaml",
    samples=samples(
        lambda draw, index: (draw(2, 3), [1, 2, 0, 1], 2.5),
        lambda draw, index: (draw(2, 4), [-1, 2]),
        lambda draw, index: (draw(2, 3), [-1, -1, -1, 0]),
    ),
)
_pair("reflection_pad1d", [2, 1], (2, 1, 3), (1, 3))
_pair("reflection_pad2d", [1, 0, 0, 1], (1, 1, 2, 3), (2, 2, 3))
_pair("reflection_pad3d", [1, 0, 0, 1, 0, 0], (1, 1, 1, 2, 2), (1, 1, 2, 2))
_pair("replication_pad1d", [2, 1], (2, 1, 3), (1, 3))
_pair("replication_pad2d", [1, 0, 0, 2], (1, 1, 2, 3), (2, 2, 3))
_pair("replication_pad3d", [1, 0, 0, 1, 1, 0], (1, 1, 1, 2, 2), (1, 1, 2, 2))
