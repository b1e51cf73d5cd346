"""Python numbers among tensors, where functorch sees the call first."""

import torch
from helpers.calls import needs_library
from torch.fx.experimental.proxy_tensor import make_fx

import torch_manualgrad as mg


@needs_library
def test_a_number_stays_a_number_under_functionalize():
    x = torch.ones(3)
    traced = make_fx(torch.func.functionalize(lambda q: (q + 1) * 2.5))
    with mg.override():
        assert "scalar_tensor" not in traced(x).code
    with mg.override("*"):  # whose rules of add and mul get tensors
        traced(x)
    assert "scalar_tensor" not in traced(x).code


def test_a_number_inside_of_other_transforms():
    x = torch.tensor([2.0, 3.0], dtype=torch.float64)

    def f(q):
        return ((q + 1) * 2.5).pow(2).sum()

    expected = 12.5 * (x + 1)
    with mg.override("*"):
        torch.testing.assert_close(torch.func.grad(f)(x), expected)
        torch.testing.assert_close(torch.func.grad(torch.func.functionalize(f))(x), expected)
        torch.testing.assert_close(torch.func.functionalize(torch.func.grad(f))(x), expected)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(x[:, None])[:, 0], expected)
