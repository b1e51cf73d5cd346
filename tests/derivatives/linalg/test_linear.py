"""The derivatives of linear, and their own: against autograd, with missing cotangents."""

import pytest
import torch
from helpers.tensors import same

from torch_manualgrad.derivatives.linalg.linear import linear_backward, linear_double_backward
from torch_manualgrad.derivatives.samples.drawing import random

F64, C128 = torch.float64, torch.complex128


def gradients(out, inputs, weight):
    return torch.autograd.grad(out, inputs, weight, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("batch", [(), (5,), (2, 5)])
@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 1), (2,), (0, 1, 2)])
def test_linears_gradient_and_its_own(batch, missing, dtype):
    x, W = random(*batch, 3, dtype=dtype).requires_grad_(), random(4, 3, dtype=dtype, seed=1).requires_grad_()
    b, G = random(4, dtype=dtype, seed=2).requires_grad_(), random(*batch, 4, dtype=dtype, seed=3).requires_grad_()
    first = torch.autograd.grad(torch.nn.functional.linear(x, W, b), (x, W, b), G, create_graph=True)
    for g, e in zip(linear_backward(x, G, W), first, strict=True):
        same(g, e)

    second = [None if i in missing else random(*t.shape, dtype=dtype, seed=4 + i) for i, t in enumerate(first)]
    found = linear_double_backward(*second, x, G, W)
    given = [(f, s) for f, s in zip(first, second, strict=True) if s is not None]
    if given:
        expected = gradients([f for f, _ in given], (x, G, W), [s for _, s in given])
    else:
        expected = tuple(map(torch.zeros_like, (x, G, W)))
    for g, e in zip(found, expected, strict=True):
        same(g, e)
