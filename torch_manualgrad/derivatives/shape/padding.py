"""Padding with a constant, with reflections or with replicas of the border, and the backwards of the latter two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import bind, formula, linear_in, operator, rule

from .common import zero_of

__all__ = ["constant_pad_nd_backward"]


@formula
def constant_pad_nd_backward(grad: Tensor, pad: Sequence[int]) -> Tensor:
    """Cotangent of $x$, given that of $x$ padded with a constant: without the padding, zeros where $x$ was cropped.

    Args:
        grad: cotangent of the result.
        pad: how many entries were added before and after, from the last dim on; negative where $x$ was cropped.

    Returns:
        The shape of $x$.
    """
    return torch.constant_pad_nd(grad, [-n for n in pad], 0)


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::constant_pad_nd",
    vjp={"self": constant_pad_nd_backward},
    jvp={"result": lambda self_t, pad: torch.constant_pad_nd(self_t, pad, 0)},
    kind="linear",
    source="ATen derivatives.yaml",
)
for _name in (
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
):
    _pad, _backward = operator(f"aten::{_name}"), operator(f"aten::{_name}_backward")
    linear_in(f"aten::{_name}", {"self": bind(_backward, grad_output="grad")})
    linear_in(
        f"aten::{_name}_backward",
        {"grad_output": bind(_pad, self="grad"), "self": lambda grad, self_sizes: zero_of(grad, self_sizes)},
    )
