"""Patches of an image as columns, and their sum: im2col and col2im, each the transpose of the other; grids of affine maps."""

from __future__ import annotations

import torch

from torch_manualgrad.core.rule import bind, linear_in

_aten = torch.ops.aten


linear_in(
    "aten::im2col",
    {
        "self": lambda grad, self_sizes, kernel_size, dilation, padding, stride: _aten.col2im(
            grad, self_sizes[-2:], kernel_size, dilation, padding, stride
        )
    },
)
linear_in("aten::col2im", {"self": bind(_aten.im2col.default, self="grad")})
linear_in("aten::affine_grid_generator", {"theta": bind(_aten.affine_grid_generator_backward.default)})
