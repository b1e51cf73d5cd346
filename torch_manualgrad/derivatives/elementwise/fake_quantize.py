"""Fake quantization: s (round(x / s + z) - z), clamped to a range of integers.

Its derivative is 0 or does not exist. What stands for it is the straight-through estimate, by convention: 1 where the
rounded number is inside of the range, else 0, in every mode; all further orders are 0.

References:
    Bengio, Leonard, Courville, Estimating or propagating gradients through stochastic neurons, arXiv:1308.3432.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, always, formula, operator, rule


@formula
def fake_quantize_cachemask_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """Cotangent of x, given that of the quantized x: g where it is inside of the range. The tangent is the same function.

    Args:
        grad: g, cotangent of the result, or tangent of x.
        mask: bool, whether the rounded number is inside of the range.

    Returns:
        The shape of ``grad``.

    References:
        ATen fake_quantize_per_tensor_affine_cachemask_backward, fake_quantize_per_channel_affine_cachemask_backward.
    """
    return grad * mask


def _straight_through(name: str) -> Callable[..., Tensor]:
    """What has the estimate for its derivative: the value is that of x in the range, and 0 outside."""

    def probe(self: Tensor, *others: Any) -> Tensor:
        # a scale is float32 in any case
        plain = [o.detach().float() if isinstance(o, Tensor) and o.is_floating_point() else o for o in others]
        found, mask = operator(name)(self, *plain)
        return found + (self * mask - found).detach()

    return probe


def _samples(*others: Any) -> Callable[[torch.dtype, torch.device | str], Iterable[Sample]]:
    """Numbers inside and outside of the range, clear of its ends; tensors among the others are no variables."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            x = torch.tensor([[-2.03, -0.71, 0.22], [0.93, 0.44, 3.07]], dtype=dtype, device=device).requires_grad_()
            yield Sample(x, *[o.to(device) if isinstance(o, Tensor) else o for o in others])

    return samples


_RANGE = (-8, 7)
_SCALES, _ZEROS = torch.tensor([0.25, 0.5, 0.3]), torch.tensor([0, 1, 0], dtype=torch.int32)

for _name, _others in (
    ("fake_quantize_per_tensor_affine_cachemask", (0.25, 1, *_RANGE)),
    ("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", (_SCALES[:1], _ZEROS[1:2], _ZEROS[1:2], *_RANGE)),
    ("fake_quantize_per_channel_affine_cachemask", (_SCALES, _ZEROS, 1, *_RANGE)),
):
    rule(
        f"aten::{_name}",
        vjp={"self": fake_quantize_cachemask_backward.bind(grad="grad_output")},
        jvp={"output": fake_quantize_cachemask_backward.bind(grad="self_t")},
        improves="missing",
        defer_to_stock=always,  # what is missing is the tangent
        source="ATen derivatives.yaml",
        samples=_samples(*_others),
        probe=_straight_through(f"aten::{_name}"),
    )
