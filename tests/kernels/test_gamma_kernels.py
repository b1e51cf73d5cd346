"""The compiled derivative of gamma samples against its formula, on every device that has it."""

from __future__ import annotations

import math

import pytest
import torch

import torch_manualgrad as mg


@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-14), (torch.float32, 3e-7)], ids=str)
def test_against_the_formula_in_double_precision(dtype, allowed, device):
    formula = mg.ops.standard_gamma_grad

    def same(a, x):
        expected = formula.reference(a.double(), x.double())
        found = formula(a.to(device), x.to(device))
        assert found.dtype == dtype and found.shape == x.shape and found.device.type == device
        torch.testing.assert_close(found.cpu().double(), expected, rtol=allowed, atol=0, equal_nan=True)

    a = torch.linspace(-7, 9, 300, dtype=torch.float64).exp().expand(4, 300).contiguous()
    same(a.to(dtype), (a * torch.tensor([[1e-3], [0.7], [1.0], [1.4]], dtype=torch.float64)).to(dtype))
    special = torch.tensor([0.0, 0.5, 1.0, 1e4, -1.0, math.inf, math.nan], dtype=dtype)
    same(special.repeat(7), special.repeat_interleave(7))
    for shape in ((0,), (), (2, 0)):
        same(torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype))


def test_bad_arguments_are_named(device):
    op = torch.ops.manualgrad.standard_gamma_grad.kernel
    x = torch.ones(2, 3, device=device)
    for a, message in (
        (x[:1], "a: expected the shape of x"),
        (x.double(), "a, x: expected two tensors of float32, or of float64"),
        (torch.ones(3, 2, device=device).T, "a, x: not contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(a, x)
    with pytest.raises(RuntimeError, match="expected two tensors of float32"):
        op(x.half(), x.half())
