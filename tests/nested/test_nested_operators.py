"""The operators of a Ragged: arithmetic, comparisons, products, also under transforms and in graphs."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from helpers.ragged_kinds import C128, F64, KINDS, ragged, same_components
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import check

# -- operators --------------------------------------------------------------------------------------------------------

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.floordiv, operator.mod]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
OTHERS = {
    "number": lambda kind: 1.5,
    "integer": lambda kind: 2,
    "0-dim tensor": lambda kind: torch.tensor(0.5, dtype=F64),
    "dense": lambda kind: random(3 if kind == "first" else 1, seed=9),
    "one for each": lambda kind: random(3, 1, 1, seed=9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("f", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
def test_operators(f, kind):
    r = ragged(kind)
    r = r.abs() if f is operator.pow else r
    for name, make in OTHERS.items():
        other = make(kind)
        parts = list(other) if name == "one for each" else [other] * 3
        if f is operator.pow and isinstance(other, torch.Tensor):
            other, parts = other.abs(), [p.abs() for p in parts]
        same_components(f(r, other), [f(c, p) for c, p in zip(r, parts)])
        same_components(f(other, r), [f(p, c) for c, p in zip(r, parts)])
    second = Ragged(r.values.flip(0), r.offsets, r.shape, r.sizes)
    same_components(f(r, second), [f(a, b) for a, b in zip(r, second)])


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_one(kind):
    r = ragged(kind)
    same_components(-r, [-c for c in r])
    same_components(+r, list(r))
    same_components(abs(r), [abs(c) for c in r])
    same_components(~(r > 0) & (r < 1) | (r > 2) ^ (r > 3), [~(c > 0) & (c < 1) | (c > 2) ^ (c > 3) for c in r])


def test_products_of_matrices():
    r, w, v = ragged(), random(3, 2), random(4, 3)
    same_components(r @ w, [c @ w for c in r])
    same_components(v @ r.mT, [v @ c.mT for c in r])
    torch.testing.assert_close(r.mT @ r, torch.stack([c.mT @ c for c in r]))
    x = r
    x @= w  # a new one
    same_components(x, [c @ w for c in r])


def test_integers_promote_with_numbers_as_in_torch():
    r = Ragged(torch.arange(3), torch.tensor([0, 1, 3]), (2, None))
    for f in (operator.add, operator.sub, operator.mul, operator.truediv):
        same_components(f(0.5, r + 1), [f(0.5, c + 1) for c in r])
        same_components(f(r + 1, 0.5), [f(c + 1, 0.5) for c in r])
    assert (r + 1).dtype == torch.int64 and (r / 2).dtype == torch.float32


def test_operators_with_a_non_number():
    r = ragged()
    for other in ("a", [1.0], None, object()):
        with pytest.raises(TypeError, match="unsupported operand"):
            r + other
        with pytest.raises(TypeError, match="unsupported operand"):
            other - r
        assert (r == other) is False and (r != other) is True
    np = pytest.importorskip("numpy")
    same_components(np.float64(2) * r, [2 * c for c in r])
    same_components(r / np.float32(2), [c / 2 for c in r])
    with pytest.raises(TypeError, match="unsupported operand"):
        np.ones(3) * r
    with pytest.raises(ValueError, match="other: .*offsets differ"):
        r + Ragged.from_components([random(n, 3) for n in (1, 1, 4)])


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_operators(kind, dtype):
    r = ragged(kind, dtype)
    dense = random(3 if kind == "first" else 1, dtype=dtype, seed=5) + 3
    two = (dtype.is_complex and 2) or 2.5

    def expression(values, dense):
        x = r.like(values)
        return ((2 - x) * dense / (x * x + 5) - (-x) / 3 + (x * x + 2) ** two + dense * x - x / dense).values

    check(expression, [(r.values, dense)])
    if kind == "first":
        check(lambda v, w: (r.like(v) @ w @ w.mT).values, [(r.values, random(3, 2, dtype=dtype))])
        check(lambda v: r.like(v).mT @ r.like(v), [(r.values,)])
    if not dtype.is_complex:
        check(lambda v: (abs(r.like(v)) + r.like(v).exp().softmax(1)).values, [(r.values,)])


# -- transforms -------------------------------------------------------------------------------------------------------


def loss(r):
    x = torch.softmax((2 - r) * 3 + r**2 / 2, 1)
    return (F.gelu(-x) * x.exp()).sum() + abs(r[0]).sum() + (r > 0).sum()


def test_transforms_of_operators():
    r = ragged()
    g = torch.func.grad(lambda v: loss(r.like(v)))(r.values)
    leaf = r.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad.values, g)
    H = torch.func.hessian(lambda v: loss(r.like(v)))(r.values)
    assert H.isfinite().all()
    values = torch.stack([r.values, r.values / 2])
    found = torch.func.vmap(lambda v: loss(r.like(v)))(values)
    torch.testing.assert_close(found, torch.stack([loss(r.like(v)) for v in values]))
    tangent = torch.func.jvp(lambda v: loss(r.like(v)), (r.values,), (torch.ones_like(r.values),))[1]
    torch.testing.assert_close(tangent, g.sum())


@pytest.mark.parametrize("kind", ["first", "last"])
def test_operators_in_a_graph(kind):
    r = ragged(kind)

    def f(values, offsets):
        x = Ragged(values, offsets, r.shape)
        w = torch.eye(3, dtype=F64)
        y = torch.softmax((2 - x) * 3 + x**2 / 2 - torch.matmul(x, w) if kind == "first" else 2 / (x + 9), 1)
        return (F.relu(-y + 0.3) * y.exp() + values.new_ones(1)).sum(), abs(y).values

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    v = r.values.clone().requires_grad_()
    for found, expected in zip(compiled(v, r.offsets), f(v, r.offsets)):
        torch.testing.assert_close(found, expected)
    (a,), (b,) = (torch.autograd.grad(g(v, r.offsets)[0], v) for g in (compiled, f))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("f", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
def test_operators_with_a_tensor_in_a_graph(f):
    """The compiler exchanges the arguments of ``r - tensor``, and calls the reflected method."""
    r, t = ragged().abs() + 0.1, random(3).abs() + 0.1

    def both(values, offsets, t):
        x = Ragged(values, offsets, r.shape)
        return f(x, t).values, f(t, x).values

    torch.compiler.reset()  # one function's graphs are counted, and there are many operators
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(r.values, r.offsets, t), both(r.values, r.offsets, t)):
        torch.testing.assert_close(found, expected)


def test_products_in_a_graph_are_not_exchanged():
    w, r = random(3, 3), ragged()
    compiled = torch.compile(lambda v, o, w: (Ragged(v, o, r.shape) @ w).values, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch.matmul\(a, b\)"):
        compiled(r.values, r.offsets, w)
    torch.compiler.reset()
    broken = torch.compile(lambda x, w: (x @ w).values, backend="eager")
    try:
        found = broken(r, w)
    except TypeError as error:
        assert "torch.matmul(a, b)" in str(error)
    else:
        torch.testing.assert_close(found, (r @ w).values)


def test_a_ragged_as_an_argument_of_a_graph():
    compiled = torch.compile(loss, backend="aot_eager")
    r = ragged()
    torch.testing.assert_close(compiled(r), loss(r))


def test_under_override():
    r = ragged()
    gradient = torch.func.grad(lambda v: loss(r.like(v)))
    expected = gradient(r.values)
    with mg.override("*"):
        torch.testing.assert_close(gradient(r.values), expected)
