"""Derivatives that do not exist: nan, but for a loss that does not depend on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula


@formula(kernel=("default",))
def nan_unless_zero(x: Tensor, undefined: Tensor) -> Tensor:
    """x, with nan for its entries that are undefined and not zero; linear, and its own adjoint and derivative.

    Args:
        x: any shape and dtype.
        undefined: bool, broadcasts to ``x``.

    Returns:
        The shape and dtype of ``x``.

    Note:
        Where not differentiable: nowhere. A product with nan would do for x, but make a cotangent of zero nan.

    References:
        The derivative of what has none, in a loss that does not depend on it.
    """
    return x * torch.where(undefined & (x != 0), math.nan, 1)


nan_unless_zero.impl_save_for_backward(lambda inputs, output: inputs.undefined)
nan_unless_zero.impl_backward(
    lambda ctx, undefined, grad: {"x": nan_unless_zero(grad, undefined), "undefined": None},
)
nan_unless_zero.impl_jvp(lambda inputs, output, tangents: nan_unless_zero(tangents.x, inputs.undefined))
