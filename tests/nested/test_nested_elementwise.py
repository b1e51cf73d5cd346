"""Elementwise functions of jagged tensors have the derivatives of dense ones under an override, at edges too."""

import math
import warnings

import pytest
import torch
from helpers.tensors import random, same

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
        except (RuntimeError, TypeError):
            return  # not differentiable, or not of real numbers
        try:
            found = gradient(function, lambda v: torch.nested.nested_tensor_from_jagged(v, OFFSETS))
        except (RuntimeError, NotImplementedError):
            return  # not of jagged tensors
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)


# -- functions of two tensors, at zeros, ties and infinities ----------------------------------------------------------

X = (0.0, 0.0, 1.0, -1.0, 2.0, math.inf, 1.0, 0.0, -0.0, 1e-30)
Y = (0.0, 1.0, 1.0, 1.0, -2.0, 1.0, math.inf, -1.0, 0.0, 1e-30)
OFFSETS_OF_PAIRS = torch.tensor([0, 4, 10])
FUNCTIONS = [
    *(torch.atan2, torch.hypot, torch.xlogy, torch.special.xlog1py, torch.logaddexp, torch.logaddexp2),
    *(torch.fmax, torch.fmin, torch.maximum, torch.minimum, torch.pow, torch.mul, torch.div),
]
OF_THE_FIRST = [torch.nextafter, torch.copysign, torch.fmod, torch.remainder]


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS_OF_PAIRS)


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
