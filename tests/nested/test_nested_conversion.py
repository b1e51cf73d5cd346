"""Ragged batches made of torch's nested tensors and into them, with their derivatives."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ragged_shapes import SHAPES, components, ragged, same_components
from helpers.tensors import random, same
from torch.func import jvp

import torch_manualgrad.nested as nested
from torch_manualgrad.core.internals import strided_nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.nested.conversion import on_nested, require_same_structure
from torch_manualgrad.nested.packing import row_strides


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
        "positions along the ragged dim differ: 6 and 5": Ragged(
            torch.zeros(5, 3), torch.tensor([0, 2, 2, 5]), x.shape
        ),
        r"offsets differ: \[0, 2, 2, 6\] and \[0, 1, 2, 6\]": Ragged(x.values, torch.tensor([0, 1, 2, 6]), x.shape),
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
