"""Operators that combine ragged batches; the reference is a loop over the components with dense torch."""

import pytest
import torch
from helpers.ragged_shapes import SHAPES, UNKNOWN, components, ragged, same_components
from helpers.tensors import random, same

import torch_manualgrad.nested as nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import Sample, check

BINARY = [nested.add, nested.sub, nested.mul, nested.div, nested.pow, nested.maximum, nested.minimum]


def positive(name, seed=0):
    return Ragged.from_components([random(*s, seed=seed + i).abs() + 0.5 for i, s in enumerate(SHAPES[name])])


@pytest.mark.parametrize("function", BINARY, ids=lambda f: f.__name__)
def test_binary(function):
    dense = getattr(torch, function.__name__)
    for name in ("first", "last", "two"):
        x, y = positive(name), positive(name, 10)
        same_components(function(x, y), [dense(a, b) for a, b in zip(x.components(), y.components())])
        with_number = (
            dense
            if function not in (nested.maximum, nested.minimum)
            else lambda a, b: dense(torch.as_tensor(a).double(), torch.as_tensor(b).double())
        )
        same_components(function(x, 2.0), [with_number(c, 2.0) for c in x.components()])
        same_components(function(2.0, x), [with_number(2.0, c) for c in x.components()])
        check(lambda a, b: function(x.like(a), y.like(b)).values, [Sample(x.values, y.values)])
    x = positive("first")
    check(lambda a, s: function(x.like(a), s).values, [Sample(x.values, torch.tensor(1.5).double())])


@pytest.mark.parametrize(
    "name, shape",
    [
        ("first", (3,)),
        ("first", (1, 3)),
        ("first", (3, 1, 3)),
        ("first", (3, 1, 1)),
        ("first", (1, 1, 3)),
        ("last", (1,)),
        ("last", (3, 1)),
        ("last", (3, 3, 1)),
        ("middle", (2, 1, 2)),
        ("middle", (2, 1, 1, 2)),
        ("middle", (2, 2, 1, 1)),
        ("two", (1, 1)),
        ("two", (2, 1, 1)),
        ("outer two", (2, 1)),
        ("outer two", (2, 1, 2, 1)),
        ("outer two", (1, 1, 2, 1)),
    ],
)
def test_dense_operand(name, shape):
    x, w = ragged(name), random(*shape, seed=5)
    each = list(w.expand(x.batch, *shape[1:])) if len(shape) == x.dim() else [w] * x.batch
    expected = [c * e for c, e in zip(components(name), each)]
    same_components(nested.mul(x, w), expected)
    same_components(nested.mul(w, x), expected)
    check(lambda a, w: nested.mul(x.like(a), w).values, [Sample(x.values, w)])


@pytest.mark.parametrize(
    "name, shape",
    [
        ("first", (3, 4, 3)),
        ("first", (1, 5, 1)),
        ("last", (3, 3, 4)),
        ("middle", (2, 2, 3, 2)),
        ("vector", (3, 6)),
        ("two", (2, 3, 4)),
        ("two", (1, 3, 1)),
        ("outer two", (2, 3, 1, 3)),
    ],
)
def test_padded_operand(name, shape):
    """What lies beyond a component is not used, and its gradient is 0."""
    x, w = ragged(name), random(*shape, seed=5)
    cut = [v[tuple(slice(0, n) for n in c.shape)] for c, v in zip(components(name), w.expand(x.batch, *shape[1:]))]
    same_components(nested.mul(x, w), [c * v for c, v in zip(components(name), cut)])
    check(lambda a, w: nested.mul(x.like(a), w).values, [Sample(x.values, w)], gaps=UNKNOWN)


def test_dense_dims_broadcast():
    x = ragged("first")
    narrow, w = nested.narrow(x, 2, 0, 1), random(3, 1, 3, seed=4)
    same_components(nested.add(narrow, x), [c[:, :1] + c for c in components("first")])
    same_components(nested.add(narrow, w), [c[:, :1] + v for c, v in zip(components("first"), w)])
    assert nested.add(narrow, w).shape == (3, None, 3)
    same_components(nested.sub(x, 2.0, alpha=3), [c - 6 for c in components("first")])
    same_components(nested.div(x, 0.3, rounding_mode="floor"), [(c / 0.3).floor() for c in components("first")])


def test_operands_that_do_not_broadcast():
    x, two = ragged("first"), ragged("outer two")
    for shape in ((6, 3), (2, 1, 3), (3, 3, 3), (1, 3, 1, 3)):
        with pytest.raises(ValueError, match="other: shape .* does not broadcast to Ragged"):
            nested.mul(x, torch.zeros(shape))
    with pytest.raises(ValueError, match="other: size 3 in dim 2"):
        nested.mul(two, torch.zeros(3, 1))
    with pytest.raises(TypeError, match="expected a Ragged or a nested tensor"):
        nested.mul(x.values, 2.0)


def test_half_gradient_at_a_tie():
    x = ragged("vector")
    a = x.values.clone().requires_grad_()
    (g,) = torch.autograd.grad(nested.maximum(x.like(a), x).values.sum(), a)
    same(g, torch.full_like(a, 0.5))


def test_dropout():
    x = ragged("first")
    for p, expected in ((0.0, x.values), (1.0, 0 * x.values)):
        same(nested.dropout(x, p).values, expected)
    same(nested.dropout(x, 0.5, training=False).values, x.values)
    v = x.values.clone().requires_grad_()
    torch.manual_seed(0)
    made = nested.dropout(x.like(v), 0.25).values
    (g,) = torch.autograd.grad(made.sum(), v)
    assert set(g.unique().tolist()) == {0.0, 1 / 0.75}
    same(made, v * g)
