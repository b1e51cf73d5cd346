"""Gradients of rearrangements of tensors without elements."""

import pytest
import torch

import torch_manualgrad as mg


@pytest.mark.parametrize(
    ("f", "shape"),
    [(torch.pixel_shuffle, (2, 0, 1, 2)), (torch.pixel_unshuffle, (0, 2, 4)), (torch.channel_shuffle, (2, 0, 3, 3))],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_gradients_of_empty_tensors(f, shape):
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    with mg.override("*"):
        y = f(x, 2)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.shape == x.shape
