"""Elementwise functions of jagged tensors have the derivatives of dense ones under an override, at edges too."""

import warnings

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.testing.database.opinfo import nested_entries

OFFSETS = torch.tensor([0, 3, 8])
VALUES = [-float("inf"), -1e30, -40.0, -3.0, -0.5, -1e-200, -0.0, 0.0, 1e-200, 1e-5, 0.25, 0.5, 1.0, 40.0, 1e30]
VALUES = torch.tensor([*VALUES, float("nan")], dtype=torch.float64).reshape(8, 2)


def unary():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    entries = [op for op in nested_entries() if type(op).__name__ == "UnaryUfuncInfo" and op.supports_autograd]
    more = ("frexp", "fill", "nn.functional.prelu", "nn.functional.threshold", "jiterator_unary")  # several tensors
    return [op for op in entries if op.name not in more]


def gradient(function, make):
    v = VALUES.clone().requires_grad_()
    y = function(make(v))
    return torch.autograd.grad(y, v, torch.ones_like(y))[0]


@pytest.mark.parametrize("op", unary(), ids=lambda op: op.full_name)
def test_gradients_are_those_of_dense_tensors(op):
    kwargs, _ = op.sample_kwargs("cpu", torch.float64, VALUES)

    def function(x):
        return op.op(x, **kwargs)

    with mg.override():
        try:
            expected = gradient(function, lambda v: v)
            found = gradient(function, lambda v: torch.nested.nested_tensor_from_jagged(v, OFFSETS))
        except (RuntimeError, NotImplementedError):
            return  # not differentiable, or not of jagged tensors
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)
