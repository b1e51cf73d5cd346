"""Upsampling, which is linear: its transpose is its backward operator, and the transpose of that is the upsampling."""

from __future__ import annotations

from typing import Any

from torch_manualgrad.core.rule import bind, exists, linear_in, operator


def _upsampling(name: str, **about: Any) -> None:
    """The rules of an operator and its backward operator."""
    forward, backward = f"aten::{name}", f"aten::{name}_backward"
    if not exists(forward):
        linear_in(forward, {}, **about)
        linear_in(backward, {}, **about)
        return
    linear_in(forward, {"self": bind(operator(backward), grad_output="grad", input_size="self_sizes")}, **about)
    linear_in(backward, {"grad_output": bind(operator(forward), self="grad")}, **about)


for _dims in (1, 2, 3):
    _upsampling(f"upsample_nearest{_dims}d")
    _upsampling(f"_upsample_nearest_exact{_dims}d")
for _name in (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
):
    _upsampling(_name)
_upsampling("_upsample_lanczos2d_aa", since="2.13")
