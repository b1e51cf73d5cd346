"""Ragged batches: made of components and of padded tensors, and made into these.

The reference is everywhere a loop over the components with dense torch.
"""

import copy
import pickle

import pytest
import torch
from helpers.ragged_shapes import SHAPES, SINGLE, UNKNOWN, components, in_every_mode, ragged, same_components
from helpers.tensors import random, same
from torch.func import jvp, vjp, vmap

import torch_manualgrad.nested as nested
from torch_manualgrad.core.internals import pytree
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import Sample, check

# -- the batch itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_components_there_and_back(name, dtype):
    given = components(name, dtype)
    r = Ragged.from_components(given)
    same_components(r, given)
    same(r.flat(), torch.cat([c.reshape(-1) for c in given]))
    again = Ragged.from_flat(r.flat(), r.component_sizes(), r.shape)
    assert torch.equal(again.values, r.values) and torch.equal(again.offsets, r.offsets)
    assert r.component_sizes().tolist() == [list(c.shape) for c in given]


@pytest.mark.parametrize("name", ["last", "middle", "two"])
def test_packing_in_every_mode(name):
    given = components(name)
    check(lambda *c: Ragged.from_components(c).values, [Sample(*given)])
    r = Ragged.from_components(given)
    in_every_mode(lambda r: r.components(), r)
    in_every_mode(lambda r: r.flat(), r)
    check(lambda f: Ragged.from_flat(f, r.component_sizes(), r.shape).values, [Sample(r.flat())])


def test_which_dims_are_ragged():
    equal = [random(2, 3), random(2, 3, seed=1)]
    assert Ragged.from_components(equal).shape == (2, None, 3)
    assert Ragged.from_components(equal, ragged_dims=[2]).shape == (2, 2, None)
    assert Ragged.from_components(equal, ragged_dims=[1, 2]).shape == (2, None, None)
    assert ragged("two").shape == (2, None, None) and ragged("last").shape == (3, 3, None)
    for bad in ([], [0], [3]):
        with pytest.raises(ValueError, match="ragged_dims"):
            Ragged.from_components(equal, ragged_dims=bad)
    with pytest.raises(ValueError, match=r"differ in dims \[1\]"):
        Ragged.from_components(components("first"), ragged_dims=[2])
    for bad in ([], [random(2), random(2, 2)], [random(), random()]):
        with pytest.raises(ValueError, match="components: expected"):
            Ragged.from_components(bad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bad_structure(dtype):
    def made(at, shape=(2, None, 3), values=(4, 3)):
        return Ragged(torch.zeros(values), torch.tensor(at, dtype=dtype), shape)

    assert made([0, 1, 4]).read_offsets() == [0, 1, 4]
    assert made([0], (0, None, 3), (0, 3)).components() == []
    for at, message in (
        ([0, 3, 2], "decrease from 3 to 2 at component 1"),
        ([0, 5, 4], "decrease from 5 to 4"),
        ([0, 2, 5], "end with the buffer at 4, got 5"),
        ([0, 2, 3], "end with the buffer at 4, got 3"),
        ([1, 2, 4], "start at 0, got 1"),
        ([-1, 2, 4], "start at 0, got -1"),
        ([0, 4], r"expected shape \[3\]"),
        ([[0, 2, 4]], r"expected shape \[3\]"),
    ):
        with pytest.raises(ValueError, match=f"offsets: .*{message}"):
            made(at)
    for shape in ((2, 4, 3), (None, None, 3), (2, None, -3)):
        with pytest.raises(ValueError, match="shape: expected"):
            made([0, 2, 4], shape)
    for shape in ((2, None, 4), (2, None), (2, None, 3, 1)):
        with pytest.raises(ValueError, match="values: shape"):
            made([0, 2, 4], shape)
    with pytest.raises(ValueError, match="sizes: given exactly if"):
        made([0, 2, 4], (2, None, None))


def test_bad_dtypes_and_sizes():
    for bad in (torch.float32, torch.int16, torch.bool):
        with pytest.raises(TypeError, match=f"offsets: expected int32 or int64, got {bad}"):
            Ragged(torch.zeros(1), torch.tensor([0, 1]).to(bad), (1, None))
    offsets, shape = torch.tensor([0, 6, 10]), (2, None, None)
    assert Ragged(torch.zeros(10), offsets, shape, torch.tensor([[2, 3], [4, 1]])).dim() == 3
    for sizes, message in (
        ([[2, 3], [4, 2]], "do not fit"),
        ([[-2, -3], [4, 1]], "do not fit"),
        ([[2, 3]], "expected shape"),
    ):
        with pytest.raises(ValueError, match=f"sizes: .*{message}"):
            Ragged(torch.zeros(10), offsets, shape, torch.tensor(sizes))
    with pytest.raises(TypeError, match="sizes: expected int32"):
        Ragged(torch.zeros(10), offsets, shape, torch.tensor([[2.0, 3], [4, 1]]))


def test_frozen_and_other_values():
    r = ragged("last")
    with pytest.raises(AttributeError, match="frozen: cannot set 'values'"):
        r.values = r.values
    assert r.like(r.values.sin()).offsets is r.offsets
    for bad in (r.values[:, :-1], r.values[:-1], r.values.flatten()):
        with pytest.raises(ValueError, match="values: "):
            r.like(bad)
    for copied in (copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert torch.equal(copied.values, r.values) and copied.shape == r.shape
    with pytest.raises(IndexError, match="dim: 3 is out of range"):
        r.wrapped(3)
    assert repr(r) == "Ragged((3, 3, *), torch.float64)"


@pytest.mark.parametrize("name", ["middle", "two"])
def test_pytree(name):
    r = ragged(name)
    leaves, spec = pytree.tree_flatten(r)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves) and len(leaves) == 2 + (name == "two")
    again = pytree.tree_unflatten(leaves, spec)
    assert again.values is r.values and again.offsets is r.offsets and again.shape == r.shape
    same_components(again, components(name))
    assert pytree.tree_map(lambda leaf: 0 if leaf is r.values else None, r).offsets is None


@pytest.mark.parametrize("name", ["last", "two"])
def test_func_transforms(name):
    r = ragged(name)

    def f(v):
        return nested.mul(nested.transpose(r.like(v), 1, 2), r.like(v).to_padded()[0, 0, 0]).values

    t = random(*r.values.shape, seed=7)
    value, tangent = jvp(f, (r.values,), (t,))
    gradient = vjp(f, r.values)[1](value)[0]
    same((gradient * t).sum(), (value * tangent).sum())
    many = torch.stack([r.values, t])
    same(vmap(f)(many), torch.stack([f(v) for v in many]))
    # a Ragged as an argument, its values batched and its structure not
    batched = pytree.tree_map(lambda leaf: many if leaf is r.values else leaf, r)
    in_dims = pytree.tree_map(lambda leaf: 0 if leaf is many else None, batched)
    padded = vmap(lambda r: r.to_padded(), in_dims=(in_dims,))(batched)
    same(padded[1], r.like(t).to_padded())


def test_compile():
    def f(r, w):
        return nested.add(nested.select(nested.mul(r, w), 2, 1), r.like(r.values.sin()).values.sum())

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for lengths in ([2, 0, 4], [1, 3, 3]):
        r = Ragged.from_components([random(n, 3, seed=n) for n in lengths])
        w = random(3, seed=9).requires_grad_()
        made = compiled(r, w)
        assert isinstance(made, Ragged) and made.shape == (3, None)
        expected = f(r, w)
        same(made.values, expected.values)
        same(torch.autograd.grad(made.values.sum(), w), torch.autograd.grad(expected.values.sum(), w))


# -- padded -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_to_padded(name):
    r, given = ragged(name), components(name)
    full = [max(sizes) for sizes in zip(*SHAPES[name])]
    expected = torch.full([len(given), *full], -7.0, dtype=torch.float64)
    for place, c in zip(expected, given):
        place[tuple(slice(n) for n in c.shape)] = c
    same(r.to_padded(-7.0), expected)
    longer = [n + 1 if d + 1 in r.ragged_dims else n for d, n in enumerate(full)]
    wide = nested.to_padded_tensor(r, 0.0, [len(given), *longer])
    assert list(wide.shape[1:]) == longer
    same(wide[(slice(None), *map(slice, full))], r.to_padded())
    same(wide.sum(), r.values.sum())
    with pytest.raises(ValueError, match="length: .* shorter"):
        r.to_padded(length=[full[d - 1] - 1 for d in r.ragged_dims])
    with pytest.raises(ValueError, match="output_size"):
        nested.to_padded_tensor(r, 0.0, [len(given) + 1, *full])


@pytest.mark.parametrize("name", ["first", "middle", "two"])
def test_padded_in_every_mode(name):
    r = ragged(name)
    in_every_mode(lambda r: r.to_padded(2.0), r)
    if r.sizes is None:
        padded, dim = r.to_padded(2.0), r.ragged_dims[0]
        check(lambda p: Ragged.from_padded(p, r.lengths, ragged_dim=dim).values, [Sample(padded)], gaps=UNKNOWN)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_from_padded(name, dtype):
    r = ragged(name)
    dim, padded = r.ragged_dims[0], r.to_padded(float("nan"))
    a = Ragged.from_padded(padded, r.lengths.to(dtype), ragged_dim=dim)
    b = Ragged.from_padded(padded, offsets=r.offsets.to(dtype), ragged_dim=dim, total=int(r.offsets[-1]))
    for made in (a, b):
        same_components(made, components(name))
        assert made.offsets.dtype is dtype


def test_bad_padded():
    p, n = random(2, 3, 4), torch.tensor([1, 3])
    for arguments in ({}, {"lengths": n, "offsets": n}):
        with pytest.raises(ValueError, match="one of the two"):
            Ragged.from_padded(p, **arguments)
    for bad in (torch.tensor([1, 4]), torch.tensor([-1, 2])):
        with pytest.raises(ValueError, match="lengths: expected from 0 to 3"):
            Ragged.from_padded(p, bad)
    with pytest.raises(ValueError, match="does not fit 2 components"):
        Ragged.from_padded(p, torch.tensor([1]))
    with pytest.raises(ValueError, match="start at 0"):
        Ragged.from_padded(p, offsets=torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="int32 or int64"):
        Ragged.from_padded(p, n.double())
    for bad in (0, 3, -4):
        with pytest.raises(IndexError, match=f"ragged_dim: {bad}"):
            Ragged.from_padded(p, n, ragged_dim=bad)
    with pytest.raises(ValueError, match="total: 4"):
        Ragged.from_padded(p[:, :0], torch.tensor([0, 0]), total=4)


def test_nothing_to_pad():
    none = Ragged(torch.zeros(0, 3), torch.tensor([0]), (0, None, 3))
    assert none.to_padded().shape == (0, 0, 3) and none.to_padded(length=5).shape == (0, 5, 3)
    empty = Ragged(torch.zeros(0, 3), torch.tensor([0, 0]), (1, None, 3))
    same(empty.to_padded(4.0, 2), torch.full((1, 2, 3), 4.0))
    assert Ragged.from_padded(torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.int64)).shape == (0, None, 3)
