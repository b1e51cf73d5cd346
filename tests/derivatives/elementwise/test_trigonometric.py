"""atan2 beside PyTorch's, in what the samples of all rules do not reach."""

import pytest
import torch

import torch_manualgrad as mg

ATAN2 = mg.rules["aten::atan2"]


@pytest.mark.parametrize("quadrant", [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)], ids=str)
def test_the_hessian_in_every_quadrant(quadrant):
    x = torch.tensor(quadrant, dtype=torch.float64) * torch.tensor([1.0, 2.0], dtype=torch.float64)
    hessian = torch.func.hessian(lambda x: torch.atan2(x[0], x[1]))
    expected = hessian(x)
    with mg.override(ATAN2):
        torch.testing.assert_close(hessian(x), expected)


def test_at_the_origin_every_order_is_zero():
    x = torch.zeros(2, dtype=torch.float64)
    with mg.override(ATAN2):
        assert torch.func.grad(lambda x: torch.atan2(x[0], x[1]))(x).eq(0).all()
        assert torch.func.hessian(lambda x: torch.atan2(x[0], x[1]))(x).eq(0).all()
