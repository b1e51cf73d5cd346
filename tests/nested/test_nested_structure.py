"""Ragged batches: made of components, of padded tensors and of torch's nested tensors, and made into these.

The reference is everywhere a loop over the components with dense torch.
"""

import copy
import pickle

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ragged import SHAPES, SINGLE, UNKNOWN, components, in_every_mode, ragged, same_components
from helpers.tensors import random, same
from torch.func import jvp, vjp, vmap

import torch_manualgrad.nested as nested
from torch_manualgrad.core.internals import pytree, strided_nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.nested.conversion import on_nested, require_same_structure
from torch_manualgrad.nested.packing import row_strides
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
    assert r.summary() == "Ragged((3, 3, *), torch.float64)"


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


# -- torch's nested tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_there_and_back(name, layout):
    given, r = components(name), ragged(name)
    if layout is torch.jagged and r.sizes is not None:
        with pytest.raises(ValueError, match=r"layout: torch.jagged has one ragged dim, this has \[1, "):
            r.to_nested(layout)
        return
    nt = r.to_nested(layout)
    assert nt.is_nested and nt.layout is layout
    same_components(nt.unbind(), given)
    again = Ragged.from_nested(nt)
    same_components(again, given)
    if layout is torch.jagged:
        assert nt.offsets() is r.offsets and again.offsets is r.offsets
        assert nt.values().data_ptr() == r.values.data_ptr()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", ["first", "last", "middle"])
def test_transposed_nested_differentiates_twice(name, layout):
    """Stock: strided, contiguous() gives a wrong gradient; jagged, values() has no second derivative."""
    r = ragged(name)
    dims = (r.ragged_dims[0], 1 if r.ragged_dims[0] == 2 else 2)
    weight = torch.arange(1.0, 1 + r.values.numel(), dtype=torch.float64)

    def f(v):
        read = Ragged.from_nested(r.like(v).to_nested(layout).transpose(*dims))
        return read.values.sin() * weight.reshape(read.values.shape)

    v = r.values.clone().requires_grad_()
    same_components(
        Ragged.from_nested(r.to_nested(layout).transpose(*dims)),
        [c.transpose(dims[0] - 1, dims[1] - 1) for c in components(name)],
    )
    assert torch.autograd.gradcheck(f, v) and torch.autograd.gradgradcheck(f, v)


def test_stock_backward_of_a_transposed_nested_tensor():
    """Stock's view of a buffer hands a transposed cotangent back in the wrong order; ours goes over the components."""
    r = Ragged.from_components([random(1, 2), random(2, 2)])
    weight = torch.arange(6.0, dtype=torch.float64)
    sizes, starts = r.component_sizes(), torch.tensor([0, 2])

    def gradient(make):
        v = r.values.clone().requires_grad_()
        return torch.autograd.grad((make(v).transpose(1, 2).contiguous().values() * weight).sum(), v)[0].flatten()

    stock = gradient(lambda v: strided_nested(v.flatten(), sizes, row_strides(sizes), starts))
    ours = gradient(lambda v: r.like(v).to_nested(torch.strided))
    right = torch.tensor([0.0, 1, 2, 4, 3, 5], dtype=torch.float64)
    same(ours, right)
    assert not torch.equal(stock, right)


@pytest.mark.parametrize("contiguous", [False, True])
def test_reading_a_tensor_that_stock_transposed(contiguous):
    """Second order through values() takes the buffer of a transposed cotangent for that of a contiguous one."""

    def f(v):
        nt = torch.nested.as_nested_tensor([v[:2].reshape(1, 2), v[2:].reshape(2, 2)]).transpose(1, 2)
        nt = nt.contiguous() if contiguous else nt
        return Ragged.from_nested(nt).flat().sin() * torch.arange(6.0, dtype=torch.float64)

    v = random(6).requires_grad_()
    assert torch.autograd.gradcheck(f, v) and torch.autograd.gradgradcheck(f, v)


def doubled(r, layout):
    return lambda v: Ragged.from_nested(nested.mul(r.like(v).to_nested(layout), 2.0)).values


def test_forward_mode_ends_at_the_strided_border():
    """torch's strided tensors carry no tangent: an error, never a tangent lost without a word."""
    r = ragged("first")
    with fwAD.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        doubled(r, torch.strided)(fwAD.make_dual(r.values, r.values))
    with pytest.raises((RuntimeError, NotImplementedError)):
        jvp(doubled(r, torch.strided), (r.values,), (r.values,))


@pytest.mark.parametrize("name", ["first", "last"])
def test_a_jagged_tensor_has_the_tangent_of_its_buffer(name):
    r = ragged(name)

    def cubed(v):
        return Ragged.from_nested(nested.pow(r.like(v).to_nested(torch.jagged), 3)).values

    with fwAD.dual_level():
        v = r.values.clone().requires_grad_()
        out, tangent = fwAD.unpack_dual(cubed(fwAD.make_dual(v, v.detach().cos())))
        same(tangent, 3 * v.square() * v.cos())
        same(torch.autograd.grad(tangent.sum(), v)[0], 6 * v * v.detach().cos())  # reverse over forward
    v = r.values.clone().requires_grad_()
    with pytest.raises(NotImplementedError):  # torch.func's tensors have no storage, which torch's class asks for
        jvp(doubled(r, torch.jagged), (r.values,), (r.values,))
    with fwAD.dual_level():  # forward over reverse
        dual = fwAD.make_dual(v, v.detach().cos())
        (g,) = torch.autograd.grad(cubed(dual).sum(), dual, create_graph=True)
        same(fwAD.unpack_dual(g).tangent, 6 * v * v.cos())


@pytest.mark.parametrize("transform", [torch.func.grad, vmap], ids=["grad", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
def test_a_transform_refuses_a_jagged_tensor_that_autograd_tracks(transform, dtype):
    r, scale = ragged("first"), torch.tensor(2.0, dtype=torch.float64)
    nt = r.like(r.values.to(dtype)).to_nested(torch.jagged).detach().requires_grad_()
    scale = scale.expand(3) if transform is vmap else scale
    with pytest.raises(RuntimeError, match=r"inside of a torch.func transform; pass a torch_manualgrad.nested.Ragged"):
        transform(lambda c: nested.mul(nt, 2).values().abs().sum() * c)(scale)


def test_losing_the_tangent_of_a_jagged_tensor_raises():
    r = ragged("first")
    with fwAD.dual_level():
        nt = r.like(fwAD.make_dual(r.values.clone(), r.values)).to_nested(torch.jagged)
        assert nt.is_nested and nt.layout is torch.jagged and nt.dim() == 3 and nt.size(2) == 3
        for f in (
            torch.sin,
            lambda x: x.neg(),
            lambda x: x.clone(),
            lambda x: x.mul_(2),
            lambda x: x > 0,
        ):
            with pytest.raises(RuntimeError, match=r"aten\..*: the tangent of a jagged nested tensor"):
                f(nt)
        same(Ragged.from_nested(nt).values, r.values)  # nothing was written


def test_a_strided_tensor_of_part_of_a_buffer():
    """PyTorch's view of a buffer begins where the memory does, not where the buffer does."""
    r = ragged("first")
    part = r.like(torch.cat([r.values, r.values])[len(r.values) :])
    same_components(part.to_nested(torch.strided).unbind(), components("first"))
    same_components(nested.slice(r.to_nested(torch.strided), 0, 1).unbind(), components("first")[1:])


def test_jagged_with_holes():
    v = random(9, 2).requires_grad_()
    nt = torch.nested.nested_tensor_from_jagged(v, torch.tensor([1, 3, 7]), torch.tensor([2, 3]))
    r = Ragged.from_nested(nt)
    same_components(r, [v[1:3], v[3:6]])
    (g,) = torch.autograd.grad(r.values.square().sum(), v)
    same(g, 2 * v * torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 0])[:, None])
    late = torch.nested.nested_tensor_from_jagged(v.detach(), torch.tensor([1, 3, 7]))
    same_components(Ragged.from_nested(late), [v[1:3], v[3:7]])


def test_jagged_leaf():
    leaf = torch.nested.nested_tensor(components("first"), layout=torch.jagged, requires_grad=True)
    made = nested.mul(leaf, leaf)
    made.backward(torch.ones_like(made))
    same(leaf.grad.values(), 2 * leaf.values().detach())


def test_bad_nested():
    with pytest.raises(TypeError, match="nested: expected a nested tensor, got list"):
        Ragged.from_nested([1])
    with pytest.raises(TypeError, match="got Tensor"):
        Ragged.from_nested(torch.zeros(2))
    for empty in (torch.nested.nested_tensor([]), torch.nested.nested_tensor([torch.tensor(1.0)])):
        with pytest.raises(ValueError, match="at least one dim"):
            Ragged.from_nested(empty)
    none = Ragged(torch.zeros(0, 3), torch.tensor([0]), (0, None, 3))
    assert Ragged.from_nested(none.to_nested(torch.jagged)).shape == (0, None, 3)
    with pytest.raises(ValueError, match="without components"):
        none.to_nested(torch.strided)
    with pytest.raises(ValueError, match="layout: expected"):
        none.to_nested(torch.sparse_coo)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_border(layout):
    @on_nested
    def both(x, others, *, scale=1.0):
        assert isinstance(x, Ragged) and all(isinstance(o, Ragged) for o in others)
        return torch.return_types.max((x, x.lengths)), [x.like(x.values * scale)], others[0].values

    r = ragged("first")
    nt = r.to_nested(layout)
    named, (scaled,), values = both(nt, [r, nt], scale=2.0)
    assert named.values.layout is layout and named.indices.tolist() == [2, 0, 4] and torch.equal(values, r.values)
    same_components(scaled.unbind(), [2 * c for c in components("first")])
    assert isinstance(both(r, [nt])[1][0], Ragged)
    assert both.__name__ == "both"
    with pytest.raises(TypeError, match=r"both: x: expected a Ragged or a nested tensor, got \(Tensor, list\)"):
        both(r.values, [r.values])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_operators_on_nested_differentiate_twice(layout):
    r = ragged("first")

    def f(v):
        nt = r.like(v).to_nested(layout)
        made = nested.transpose(nested.mul(nested.slice(nt, 2, 1), nested.narrow(nt, 2, 0, 2)), 1, 2)
        assert made.is_nested and made.layout is layout
        return Ragged.from_nested(nested.add(made, made)).values

    v = r.values.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, v) and torch.autograd.gradgradcheck(f, v)


def test_structures_that_differ():
    x = ragged("first")
    others = {
        "number of components differ: 3 and 1": ragged("one"),
        "number of dims differ: 3 and 2": ragged("vector"),
        r"ragged dims differ: \(1,\) and \(2,\)": ragged("last"),
        r"lengths differ: \[2, 0, 4\] and \[2, 0, 3\]": Ragged(torch.zeros(5, 3), torch.tensor([0, 2, 2, 5]), x.shape),
        r"lengths differ: \[2, 0, 4\] and \[1, 1, 4\]": Ragged(x.values, torch.tensor([0, 1, 2, 6]), x.shape),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=f"other: the {message}"):
            nested.add(x, other)
    two = ragged("two")
    other = Ragged(two.values, two.offsets, two.shape, two.sizes.flip(1))
    with pytest.raises(ValueError, match="y: the sizes differ"):
        require_same_structure(two, other, name="y")
    equal = Ragged(x.values, x.offsets.int().clone(), x.shape)
    same(nested.add(x, equal).values, 2 * x.values)
