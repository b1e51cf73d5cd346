"""Formulas of joined tensors and of views, next to what PyTorch's autograd computes with its own."""

from __future__ import annotations

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.testing import check

F32, F64, C128 = torch.float32, torch.float64, torch.complex128
ops = mg.ops

JOINS = {
    "cat": (
        lambda *x: torch.cat(x, -1),
        [(2, 1), (0,), (2, 3)],
        lambda g, x: ops.cat_tensors_backward(g, [t.shape for t in x], [t.dtype for t in x], -1),
        lambda x, t: ops.cat_jvp(x, t, -1),
    ),
    "cat of vectors": (
        lambda *x: torch.cat(x),
        [(2,), (0,), (1,)],
        lambda g, x: ops.cat_tensors_backward(g, [t.shape for t in x], [t.dtype for t in x], 0),
        lambda x, t: ops.cat_jvp(x, t, 0),
    ),
    "empty cat": (
        lambda *x: torch.cat(x, 1),
        [(0, 2), (0, 3)],
        lambda g, x: ops.cat_tensors_backward(g, [t.shape for t in x], [t.dtype for t in x], 1),
        lambda x, t: ops.cat_jvp(x, t, 1),
    ),
    "stack": (
        lambda *x: torch.stack(x, 1),
        [(2, 3)] * 3,
        lambda g, x: ops.stack_tensors_backward(g, 1, [t.dtype for t in x]),
        lambda x, t: ops.stack_jvp(x, t, 1),
    ),
    "block_diag": (
        lambda *x: torch.block_diag(*x),
        [(2, 1), (2,), (), (0, 3), (1, 2)],
        lambda g, x: ops.block_diag_backward(g, [t.shape for t in x], [t.dtype for t in x]),
        lambda x, t: ops.block_diag_jvp(x, t),
    ),
}


def parts(shapes, dtypes, seed=0):
    return [random(*shape, dtype=dtypes[k % len(dtypes)], seed=seed + k) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtypes", [[F64], [C128], [F32, C128, F64]], ids=str)
@pytest.mark.parametrize("name", JOINS)
def test_joins_next_to_stock(name, dtypes):
    join, shapes, backward, pushforward = JOINS[name]
    x = [t.requires_grad_() for t in parts(shapes, dtypes)]
    y = join(*x)
    g = random(*y.shape, dtype=y.dtype, seed=9)
    expected = torch.autograd.grad(y, x, g)
    found = backward(g, x)
    for ours, stock, t in zip(found, expected, x):
        torch.testing.assert_close(ours, stock, rtol=0, atol=0)
        assert ours.shape == t.shape and ours.dtype == t.dtype
    with torch.no_grad():
        t = parts(shapes, dtypes, seed=20)
        torch.testing.assert_close(pushforward(x, t), join(*t), rtol=0, atol=0)
        some = [None if k % 2 == 0 else s for k, s in enumerate(t)]
        filled = [torch.zeros_like(p) if s is None else s for p, s in zip(x, some)]
        torch.testing.assert_close(pushforward(x, some), join(*filled), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("name", [n for n in JOINS if n != "empty cat"])
def test_joins_in_six_modes(name, dtype):
    join, shapes, backward, pushforward = JOINS[name]
    x = parts(shapes, [dtype])
    kept = [k for k, t in enumerate(x) if t.numel()]
    g = join(*x)
    check(lambda g: [backward(g, x)[k] for k in kept], [(g,)])
    check(lambda *t: pushforward(x, list(t)), [tuple(parts(shapes, [dtype], seed=5))])


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("dim", [0, -1])
def test_unbind_backward_next_to_stock(dtype, dim):
    x = random(2, 3, dtype=dtype).requires_grad_()
    slices = x.unbind(dim)
    grads = [random(*s.shape, dtype=dtype, seed=k) for k, s in enumerate(slices)]
    for given in (grads, [grads[0]] + [None] * (len(grads) - 1), [None, *grads[1:]]):
        used = [(s, g) for s, g in zip(slices, given) if g is not None]
        (stock,) = torch.autograd.grad([s for s, _ in used], x, [g for _, g in used], retain_graph=True)
        torch.testing.assert_close(ops.unbind_backward(given, dim), stock, rtol=0, atol=0)
    check(lambda *grads: ops.unbind_backward([*grads, None], dim), [tuple(grads)])


@pytest.mark.parametrize("dims", [(2, 0, 1), (-1, 0, -2), (0, 1, 2), ()], ids=str)
def test_permute_backwards_next_to_stock(dims):
    x = random(*[2, 0, 3][: len(dims)], dtype=C128).requires_grad_()
    y = x.permute(dims)
    g = random(*y.shape, dtype=C128, seed=1)
    (stock,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(ops.permute_backwards(g, dims), stock, rtol=0, atol=0)
    if dims:
        check(lambda g: ops.permute_backwards(g, dims), [(random(2, 3, 4),)])


VIEWS = [  # x, and size, stride and offset of the view
    (lambda dtype: random(3, 4, dtype=dtype), (2, 2), (4, 1), None),
    (lambda dtype: random(3, 4, dtype=dtype), (3, 3), (1, 2), 2),  # two of its entries in one place
    (lambda dtype: random(3, 4, dtype=dtype), (5, 2), (0, 3), 0),
    (lambda dtype: random(3, 4, dtype=dtype).mT, (2, 3), (5, 1), 1),
    (lambda dtype: random(12, dtype=dtype)[2:10:2], (4,), (1,), 0),  # before x, and between its entries
    (lambda dtype: random(3, 1, dtype=dtype).expand(3, 4), (3,), (1,), None),  # four entries of x in one place
    (lambda dtype: random(6, dtype=dtype).unfold(0, 3, 1), (2, 3), (1, 1), 1),
    (lambda dtype: random(4, dtype=dtype), (), (), 3),
    (lambda dtype: random(4, dtype=dtype), (0, 2), (2, 1), None),
    (lambda dtype: random(0, 3, dtype=dtype), (0,), (1,), None),
]


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("case", range(len(VIEWS)))
def test_as_strided_backward_next_to_stock(case, dtype):
    make, *view = VIEWS[case]
    x = make(dtype).requires_grad_()
    y = x.as_strided(*view)
    g = random(*y.shape, dtype=dtype, seed=1)
    (stock,) = torch.autograd.grad(y, x, g)
    geometry = (x.shape, x.stride(), x.storage_offset())
    torch.testing.assert_close(ops.as_strided_backward(g, *geometry, *view), stock, rtol=1e-14, atol=0)
    if g.numel() and x.numel():
        check(lambda g: ops.as_strided_backward(g, *geometry, *view), [(g,)])


def test_they_are_operators():
    g, x = random(3), [random(1), random(2)]
    found = torch.ops.manualgrad.cat_tensors_backward(g, [[1], [2]], [F64, F32], 0)
    assert [f.dtype for f in found] == [F64, F32] and torch.equal(found[0], g[:1])
    torch.testing.assert_close(torch.ops.manualgrad.cat_jvp(x, [None, x[1]], 0), torch.cat([0 * x[0], x[1]]))
    compiled = torch.compile(
        lambda g: ops.cat_tensors_backward(g, [[1], [2]], [F64, F64], 0), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(g), list(found[:1]) + [g[1:]])


ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.cat_tensors_backward(ONE, [[1]], [F32, F32], 0), "dtypes: expected 1, one for each of sizes, got"),
        (lambda: ops.cat_jvp([ONE, TWO], [ONE], 0), "tensors_t: expected 2, one for each of tensors_p, got 1"),
        (lambda: ops.stack_tensors_backward(TWO, 0, [F32]), "dtypes: expected 2, one for each slice of grad, got"),
        (lambda: ops.stack_jvp([ONE], [], 0), "tensors_t: expected 1, one for each of tensors_p, got 0"),
        (lambda: ops.block_diag_backward(torch.eye(2), [[1], [1]], []), "dtypes: expected 2, one for each of sizes"),
        (lambda: ops.block_diag_jvp([ONE], []), "tensors_t: expected 1, one for each of tensors_p, got 0"),
        (lambda: ops.unbind_backward([None, None], 0), r"grads: expected at least one tensor, got \[None, None\]"),
        (lambda: ops.split_backward([None], 1, 0, [1]), r"grads: expected at least one tensor, got \[None\]"),
        (lambda: ops.permute_backwards(torch.eye(2), [0, 0]), r"fwd_dims: expected each of 2 dims once, got \[0, 0\]"),
        (lambda: ops.permute_backwards(torch.eye(2), [0]), r"fwd_dims: expected each of 2 dims once, got \[0\]"),
        (lambda: ops.values_backward(ONE, torch.eye(2)), "self: expected a sparse tensor, got a dense one"),
        (lambda: ops.values_backward(ONE, torch.eye(2).to_sparse()), r"grad: expected \[2\], the shape of the values"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
