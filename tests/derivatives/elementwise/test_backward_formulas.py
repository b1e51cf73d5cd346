"""Backward formulas of ATen whose operators have one-line rules: each against the operator's own gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_manualgrad as mg


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(function, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A cotangent of the result, and the gradients of the inputs under the rules."""
    with mg.override("*"):
        result = function(*inputs)
        cotangent = draw(*result.shape, dtype=result.dtype, seed=9).detach()
        return cotangent, list(torch.autograd.grad(result, inputs, cotangent))


def test_atan2_backward():
    y, x = draw(2, 3), draw(2, 3, seed=1)
    grad, expected = gradients(torch.atan2, y, x)
    torch.testing.assert_close(list(mg.ops.atan2_backward(grad, y, x, [True, True])), expected)
    only_x = mg.ops.atan2_backward(grad, y, x, [False, True])
    torch.testing.assert_close(list(only_x), [torch.zeros_like(y), expected[1]])
    zero = torch.zeros(2, dtype=torch.float64)
    assert all(g.eq(0).all() for g in mg.ops.atan2_backward(zero + 1, zero, zero, [True, True]))


@pytest.mark.parametrize("first", [torch.float64, torch.complex128])
@pytest.mark.parametrize("second", [torch.float64, torch.complex128])
def test_mul_tensor_backward(first, second):
    x, y = draw(2, 3, dtype=first), draw(2, 3, dtype=second, seed=1)
    grad, (of_x, of_y) = gradients(torch.mul, x, y)
    torch.testing.assert_close(mg.ops.mul_tensor_backward(grad, y, first), of_x)
    torch.testing.assert_close(mg.ops.mul_tensor_backward(grad, x, second), of_y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_masked_fill_backward(dtype):
    x, value = draw(2, 3, dtype=dtype), draw(dtype=dtype, seed=1)
    mask = torch.tensor([True, False, True])
    grad, (_, of_value) = gradients(lambda x, value: x.masked_fill(mask, value), x, value)
    torch.testing.assert_close(mg.ops.masked_fill_backward(grad, mask), of_value)


def test_polar_backward():
    length, angle = draw(5).detach().abs().requires_grad_(), draw(5, seed=1)
    grad, expected = gradients(torch.polar, length, angle)
    torch.testing.assert_close(list(mg.ops.polar_backward(grad, torch.polar(length, angle))), expected)
    at_zero, _ = mg.ops.polar_backward(grad, torch.zeros(5, dtype=torch.complex128))
    assert at_zero.eq(0).all()
