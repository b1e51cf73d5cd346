"""One of two tensors, or a constant, by a mask."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, elementwise, formula


@formula
def masked_fill_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """Cotangent of the number that is filled in where a mask is True: the sum of g there.

    Args:
        grad: g, cotangent of the result.
        mask: bool, broadcast with the result.

    Returns:
        ().

    References:
        ATen masked_fill_backward.
    """
    return torch.where(mask, grad, 0).sum()


def _points(dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Numbers, and a mask."""
    x = torch.linspace(-2.3, 2.9, 6, dtype=torch.float64, device=device).reshape(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, True]], device=device)
    return torch.complex(x, x.flip(-1)).to(dtype) if dtype.is_complex else x.to(dtype), mask


def _where_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, mask = _points(dtype, device)
    yield from (Sample(mask, x, x.flip(0)), Sample(mask[:, :1], x[0], x[1, 1]), Sample(mask[0, 0], x[0, 0], x[1, 1]))


def _fill_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    x, _ = _points(dtype, device)
    yield from (Sample(x, x[1, 1]), Sample(x[0, 0], x[1, 1]), Sample(x[:0], x[1, 1]))


def _masked_samples(dtype: torch.dtype, device: torch.device | str, number: bool = False) -> Iterable[Sample]:
    x, mask = _points(dtype, device)
    value = 2.5 if number else x[1, 1]
    yield from (
        Sample(x, mask, value),
        Sample(x, mask[0], value),
        Sample(x[0], mask, value),
        Sample(x[0, 0], mask[0, 0], value),
    )


def _masked_number_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    return _masked_samples(dtype, device, number=True)


elementwise(
    "aten::where.self",
    {
        "self": lambda grad, condition: torch.where(condition, grad, 0),
        "other": lambda grad, condition: torch.where(condition, 0, grad),
    },
    samples=_where_samples,
    finite=True,
)
elementwise(
    "aten::masked_fill.Scalar",
    {"self": lambda grad, mask: grad.masked_fill(mask, 0)},
    samples=_masked_number_samples,
    finite=True,
)
elementwise(
    "aten::masked_fill.Tensor",
    {
        "self": lambda grad, mask: grad.masked_fill(mask, 0),
        "value": lambda grad, mask: torch.where(mask, grad, 0),
    },
    samples=_masked_samples,
    finite=True,
)
elementwise("aten::fill.Tensor", {"self": lambda: None, "value": lambda: 1}, samples=_fill_samples, finite=True)
