"""Degrees and orders that would never end."""

import pytest
import torch

import torch_manualgrad as mg


@pytest.mark.parametrize("order", [-1, 100_001, 2**31 - 1, 2**62])
def test_orders_out_of_range_raise(order):
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"order: expected 0 to 100000, got {order}"):
        mg.ops.orthogonal_polynomial(x, x, "legendre_polynomial_p", order)


def test_degrees_out_of_range_raise():
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="n: expected degrees of at most 100000, got 100001"):
        mg.ops.orthogonal_polynomial(x, x + 100_000, "legendre_polynomial_p", 0)
    # an order above the degree: 0
    assert torch.equal(mg.ops.orthogonal_polynomial(x, x, "legendre_polynomial_p", 3), 0 * x)
