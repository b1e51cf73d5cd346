"""Functions of two jagged tensors have the derivatives of the rules on dense tensors, also at zeros, ties and infinities."""

import math

import pytest
import torch
from helpers.tensors import random, same

import torch_manualgrad as mg

X = (0.0, 0.0, 1.0, -1.0, 2.0, math.inf, 1.0, 0.0, -0.0, 1e-30)
Y = (0.0, 1.0, 1.0, 1.0, -2.0, 1.0, math.inf, -1.0, 0.0, 1e-30)
OFFSETS = torch.tensor([0, 4, 10])
FUNCTIONS = [
    *(torch.atan2, torch.hypot, torch.xlogy, torch.special.xlog1py, torch.logaddexp, torch.logaddexp2),
    *(torch.fmax, torch.fmin, torch.maximum, torch.minimum, torch.pow, torch.mul, torch.div),
]
OF_THE_FIRST = [torch.nextafter, torch.copysign, torch.fmod, torch.remainder]


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


def gradients(f, x, y, wrap):
    given = [x, y] if f in FUNCTIONS else [x]
    found = f(wrap(x), wrap(y))
    return torch.autograd.grad((found.values() if found.is_nested else found).sum(), given)


@pytest.mark.parametrize("rules", [(), ("*",)], ids=["override", "all"])
@pytest.mark.parametrize("f", [*FUNCTIONS, *OF_THE_FIRST], ids=lambda f: f.__name__)
def test_special_points(f, rules):
    given = [torch.tensor(values, dtype=torch.float64).requires_grad_() for values in (X, Y)]
    with mg.override(*rules):
        found, expected = (gradients(f, *given, wrap) for wrap in (jagged, lambda x: x))
    for ours, of_dense in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, of_dense, equal_nan=True)


@pytest.mark.parametrize("f", [torch.atan2, torch.hypot, torch.xlogy, torch.special.xlog1py, torch.copysign])
def test_numbers_and_dense_tensors(f):
    x = random(10, 3).abs().requires_grad_()
    dense = random(1, 3, seed=1).abs()
    with mg.override():
        found = [f(jagged(x), dense[None]), *([f(jagged(x), 2.0)] if f not in (torch.atan2, torch.hypot) else [])]
        expected = [f(x, dense), *([f(x, 2.0)] if f not in (torch.atan2, torch.hypot) else [])]
        for ours, of_dense in zip(found, expected, strict=True):
            assert ours.is_nested
            same(torch.autograd.grad(ours.values().sum(), x)[0], torch.autograd.grad(of_dense.sum(), x)[0])


def test_sgn_has_a_backward():
    x = jagged(random(10, 2)).requires_grad_()
    with mg.override():
        (found,) = torch.autograd.grad(torch.sgn(x).values().sum(), x)
    assert found.values().eq(0).all()
