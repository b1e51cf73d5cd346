"""Copies: clone, conversions of dtype and device, conj; constants that are written into a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import elementwise, formula, linear_in


@formula
def _to_copy_backward(grad: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cotangent of $x$, given that of $x$ in another dtype and on another device: $g$ in the dtype and on the device of $x$.

    Args:
        grad: $g$, cotangent of the copy.
        dtype: the dtype of $x$. If it is real and ``grad`` is not, the real part is taken.
        device: the device of $x$.

    Returns:
        The shape of ``grad``.
    """
    if grad.is_complex() and not dtype.is_complex:
        grad = grad.real
    return grad.to(device, dtype, copy=True)


for name in ("clone", "_lazy_clone"):
    linear_in(f"aten::{name}", {"self": lambda grad: grad})
linear_in("aten::_conj_physical", {"self": lambda grad: grad.conj_physical()})
linear_in(
    "aten::_to_copy",
    {"self": _to_copy_backward.bind(dtype="self_dtype", device="self_device")},
    source="ATen _to_copy_backward",
)
# PyTorch's forward mode writes the zeros into the tangent of the argument
elementwise("aten::zero", None, finite=True, improves="values")
elementwise("aten::fill.Scalar", None, arguments=[{"value": 2.5}], finite=True)
