"""Operators that take ragged batches apart; the reference is a loop over the components with dense torch."""

import pytest
import torch
from helpers.ragged_shapes import SHAPES, UNKNOWN, components, in_every_mode, ragged, same_components
from helpers.tensors import random, same

import torch_manualgrad.nested as nested
from torch_manualgrad.nested import Ragged


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
