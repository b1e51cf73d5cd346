"""Operators that take ragged batches apart or combine them; the reference is a loop over the components with dense torch."""

import pytest
import torch
from helpers.ragged import SHAPES, UNKNOWN, components, in_every_mode, ragged, same_components
from helpers.tensors import random, same

import torch_manualgrad.nested as nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import Sample, check


@pytest.mark.parametrize("name", SHAPES)
def test_select(name):
    r, given = ragged(name), components(name)
    for i in (0, len(given) - 1, -1, -len(given)):
        same(nested.select(r, 0, i), given[i])
    for dim in range(1, r.dim()):
        for i in (0, -1):
            if dim in r.ragged_dims and min(c.shape[dim - 1] for c in given) == 0:
                with pytest.raises(IndexError, match=f"index: {i} is out of range for component"):
                    nested.select(r, dim, i)
                continue
            made = nested.select(r, dim - r.dim(), i)
            expected = [c.select(dim - 1, i) for c in given]
            if r.ragged_dims == (dim,):
                same(made, torch.stack(expected))
            else:
                same_components(made, expected)
            in_every_mode(lambda r: nested.select(r, dim, i), r, gaps=UNKNOWN if r.sizes is not None else None)
    in_every_mode(lambda r: nested.select(r, 0, -1), r)


def test_select_out_of_range():
    r = ragged("vector")
    for dim, index in ((0, 3), (0, -4), (1, 1), (1, -2)):
        with pytest.raises(IndexError, match=f"index: {index} is out of range"):
            nested.select(r, dim, index)
    with pytest.raises(IndexError, match="dim: 2"):
        nested.select(r, 2, 0)
    for i in (3, -4):
        with pytest.raises(IndexError, match=f"index: {i} is out of range for dim 2 of size 3"):
            nested.select(ragged("first"), 2, i)
    r = Ragged.from_components([random(1, 5), random(2, 4)])
    with pytest.raises(IndexError, match="component 1, whose size in dim 2 is 4"):
        nested.select(r, 2, 4)


def test_select_where_lengths_are_not_read():
    """What a GPU does, and a graph: no wait, nan where there is no such entry, nothing out of bounds."""
    for name in ("vector", "last"):
        r = ragged(name)
        f = torch.compile(lambda r, i: nested.select(r, -1, i), backend="eager", fullgraph=True)
        for i in (1, -2, 7):
            expected = [
                c[..., i] if -c.shape[-1] <= i < c.shape[-1] else c.new_full(c.shape[:-1], torch.nan)
                for c in components(name)
            ]
            same(f(r, i), torch.stack(expected), equal_nan=True)


SLICES = [(1, None, 1), (None, -1, 1), (0, 100, 2), (-2, None, 1), (1, 1, 1), (2, 1, 3), (None, None, 1)]


@pytest.mark.parametrize("name", SHAPES)
def test_slice(name):
    r, given = ragged(name), components(name)
    for start, end, step in SLICES:
        piece = slice(start, end, step)
        same_components(nested.slice(r, 0, start, end, step), given[piece])
        for dim in range(1, r.dim()):
            made = nested.slice(r, dim - r.dim(), start, end, step)
            assert made.ragged_dims == r.ragged_dims and made.offsets.dtype == r.offsets.dtype
            same_components(made, [c[(slice(None),) * (dim - 1) + (piece,)] for c in given])


@pytest.mark.parametrize("name", ["first", "middle", "outer two"])
def test_slice_in_every_mode(name):
    r = ragged(name)
    in_every_mode(lambda r: [nested.slice(r, d, None, -1) for d in range(r.dim())], r, gaps=UNKNOWN)
    in_every_mode(lambda r: [nested.slice(r, d, 0, None, 2) for d in range(r.dim())], r, gaps=UNKNOWN)


def test_bad_slice():
    for step in (0, -1):
        with pytest.raises(ValueError, match=f"step: expected a positive number, got {step}"):
            nested.slice(ragged("first"), 1, step=step)
    with pytest.raises(IndexError, match="dim: 3"):
        nested.slice(ragged("first"), 3)
    with pytest.raises(ValueError, match="start, length: 0 and 1 are out of range for dim 1 of size 0"):
        nested.narrow(ragged("first"), 1, 0, 1)  # one of the components is empty
    for start, length in ((-1, 1), (2, 2), (0, -1)):
        with pytest.raises(ValueError, match=f"start, length: {start} and {length} are out of range for dim 2"):
            nested.narrow(ragged("first"), 2, start, length)


@pytest.mark.parametrize("name", ["first", "last", "middle", "outer two"])
def test_split_chunk_unbind(name):
    r, given = ragged(name), components(name)
    dense = [d for d in range(1, r.dim()) if d not in r.ragged_dims]
    same_components(nested.unbind(r), given)
    for dim in [0, *dense]:
        size = r.batch if dim == 0 else r.shape[dim]
        sizes = [1, 0, size - 1]
        pieces = nested.split_with_sizes(r, sizes, dim)
        start = 0
        for piece, n in zip(pieces, sizes):
            same_components(
                piece, given[start : start + n] if dim == 0 else [c.narrow(dim - 1, start, n) for c in given]
            )
            start += n
        gaps = UNKNOWN if dim and r.sizes is not None else None
        in_every_mode(lambda r: nested.split_with_sizes(r, sizes, dim), r, gaps=gaps)
        for chunks in (1, 2, 5):
            pieces = nested.chunk(r, chunks, dim - r.dim())
            if dim == 0:
                expected = [given[i : i + -(-size // chunks)] for i in range(0, size, -(-size // chunks))]
            else:
                expected = list(zip(*(c.chunk(chunks, dim - 1) for c in given)))
            assert len(pieces) == len(expected)
            for piece, e in zip(pieces, expected):
                same_components(piece, e)
        in_every_mode(lambda r: nested.chunk(r, 2, dim), r, gaps=gaps)
    for dim in dense:
        for i, piece in enumerate(nested.unbind(r, dim)):
            same_components(piece, [c.select(dim - 1, i) for c in given])
        in_every_mode(lambda r: nested.unbind(r, dim), r, gaps=gaps)
    for dim in r.ragged_dims:
        for f in (
            lambda: nested.unbind(r, dim),
            lambda: nested.chunk(r, 2, dim),
            lambda: nested.split_with_sizes(r, [1], dim),
        ):
            with pytest.raises(ValueError, match=f"dim: cannot .* along {dim}, a ragged dim of Ragged"):
                f()


def test_pieces_along_a_ragged_dim_whose_sizes_agree():
    given = [random(4, 2, seed=i) for i in range(3)]
    for r in (Ragged.from_components(given), Ragged.from_components(given, ragged_dims=[1, 2])):
        assert None in r.shape
        for made, cut in (
            (nested.chunk(r, 2, 1), [c.chunk(2) for c in given]),
            (nested.split(r, 3, 1), [c.split(3) for c in given]),
            (nested.split(r, [1, 3], 1), [c.split([1, 3]) for c in given]),
            ([nested.narrow(r, 1, 1, 2)], [[c.narrow(0, 1, 2)] for c in given]),
            (nested.unbind(r, 1), [c.unbind(0) for c in given]),
        ):
            assert len(made) == len(cut[0])
            for i, m in enumerate(made):
                same_components(m, [c[i] for c in cut])
    in_every_mode(lambda r: nested.chunk(r, 2, 1), Ragged.from_components(given), gaps=UNKNOWN)


def test_bad_split():
    r = ragged("first")
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"split_size: expected a positive number, got {size}"):
            nested.split(r, size, 2)
    for sizes in ([1, 1], [4, -1], []):
        with pytest.raises(ValueError, match="split_sizes"):
            nested.split_with_sizes(r, sizes, 2)
    with pytest.raises(ValueError, match="chunks: expected a positive number, got 0"):
        nested.chunk(r, 0, 2)
    empty = Ragged(torch.zeros(4, 0), torch.tensor([0, 4]), (1, None, 0))
    assert [p.shape for p in nested.chunk(empty, 3, 2)] == [(1, None, 0)] * 3
    assert [list(t.shape) for t in torch.zeros(0).chunk(3)] == [[0]] * 3


@pytest.mark.parametrize("name", ["first", "last", "middle", "two", "outer two"])
def test_transpose(name):
    r, given = ragged(name), components(name)
    for a in range(1, r.dim()):
        for b in range(1, r.dim()):
            made = nested.transpose(r, a, b - r.dim())
            same_components(made, [c.transpose(a - 1, b - 1) for c in given])
    in_every_mode(lambda r: nested.transpose(r, 1, -1), r)
    with pytest.raises(ValueError, match="batch dim"):
        nested.transpose(r, 0, 1)
    with pytest.raises(IndexError, match="dim1: 7"):
        nested.transpose(r, 0, 7)


def test_no_components():
    one = Ragged(torch.zeros(2, 0, 3), torch.tensor([0]), (0, 2, None, 3))
    several = Ragged(torch.zeros(0), torch.tensor([0]), (0, 2, None, None), torch.zeros(0, 2, dtype=torch.int64))
    for r in (one, several):
        assert nested.unbind(r) == [] and r.to_padded().shape[:2] == (0, 2)
        assert nested.select(r, 1, 0).shape == (0, *r.shape[2:])
        assert nested.select(r, 2, 4).shape[0] == 0
        assert nested.slice(r, 2, 1).shape == nested.slice(r, 0, 1).shape == r.shape
        assert [p.shape[:2] for p in nested.chunk(r, 2, 1)] == [(0, 1)] * 2
        assert nested.transpose(r, 1, 2).shape[2] == 2
        assert nested.mul(r, torch.zeros(0, 2, 1, 1)).shape == r.shape
        with pytest.raises(IndexError, match="index: 0 is out of range for 0 components"):
            nested.select(r, 0, 0)


# -- operators that combine -------------------------------------------------------------------------------------------

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
        ("first", (1, 4, 1)),
        ("last", (3, 3, 4)),
        ("middle", (2, 2, 3, 2)),
        ("vector", (3, 5)),
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
