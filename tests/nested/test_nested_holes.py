"""Positions of a jagged buffer that belong to no component: no gradient of a shared argument, and no sum, counts them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import random, same

import torch_manualgrad as mg
from torch_manualgrad import nested
from torch_manualgrad.core.override.replacements import replacements
from torch_manualgrad.core.rule import operator, reached
from torch_manualgrad.nested.backward import BACKWARD

OFFSETS, LENGTHS = torch.tensor([0, 3, 8]), torch.tensor([2, 3])
HOLES = [2, 6, 7]
USED = [0, 1, 3, 4, 5]
ONES = torch.ones(3, 4, dtype=torch.float64)

# by the aten name: a function of a jagged tensor (2, *, 4) and a dense one, whose shape is given
SHARED = {
    "matmul": (lambda x, p: x @ p, (4, 3)),
    "bmm": (lambda x, p: torch.bmm(x, p), (2, 4, 3)),
    "linear": (lambda x, p: F.linear(x, p), (3, 4)),
    "linear, bias": (lambda x, p: F.linear(x, ONES, p), (3,)),
    "layer_norm": (lambda x, p: F.layer_norm(x, (4,), p, p), (4,)),
    "layer_norm, bias": (lambda x, p: F.layer_norm(x, (4,), None, p), (4,)),
    "rms_norm": (lambda x, p: F.rms_norm(x, (4,), p), (4,)),
    "add.Tensor": (torch.add, (4,)),
    "sub.Tensor": (torch.sub, (4,)),
    "rsub.Tensor": (torch.rsub, (4,)),
    "mul.Tensor": (torch.mul, (4,)),
    "mul.Tensor, number": (torch.mul, ()),
    "mul.Tensor, exchanged": (lambda x, p: p * x, (1, 1, 4)),
    "mul.Tensor, each": (torch.mul, (2, 1, 4)),
    "mul.Tensor, padded": (torch.mul, (2, 3, 4)),
    "div.Tensor": (torch.div, (4,)),
    "div.Tensor, exchanged": (lambda x, p: p / x, (4,)),
    "div.Tensor_mode": (lambda x, p: torch.div(x, p, rounding_mode=None), (4,)),
    "pow.Tensor_Tensor": (torch.pow, (4,)),
    "pow.Tensor_Tensor, exchanged": (lambda x, p: p**x, (4,)),
    "maximum": (torch.maximum, (4,)),
    "minimum": (torch.minimum, (4,)),
    "max.other": (torch.max, (4,)),
    "min.other": (torch.min, (4,)),
    **{name: (getattr(torch, name), (4,)) for name in "atan2 hypot logaddexp logaddexp2".split()},
    "xlogy.Tensor": (torch.xlogy, (4,)),
    "special_xlog1py": (torch.special.xlog1py, (4,)),
    "copysign.Tensor": (lambda x, p: torch.copysign(p, x), (4,)),
    "nextafter": (lambda x, p: torch.nextafter(p, x), (4,)),
}
# PyTorch's own functions, whose backwards sum over the batch and the ragged dim
BY_PYTORCH = {
    **{name: (getattr(torch, name), (4,)) for name in "fmax fmin fmod".split()},
    "where": (lambda x, p: torch.where(x > 1.2, x, p), (4,)),
    "where, exchanged": (lambda x, p: torch.where(x > 1.2, p, x), (4,)),
}
# the same functions without an override
BY_US = {
    **{f"nested.{n}": (getattr(nested, n), (4,)) for n in "add sub mul div pow maximum minimum".split()},
    "nested.matmul": (nested.matmul, (4, 3)),
    "nested.linear": (lambda x, p: nested.linear(x, p, p[:, 0]), (3, 4)),
    "nested.layer_norm": (lambda x, p: nested.layer_norm(x, (4,), p, p), (4,)),
    "nested.rms_norm": (lambda x, p: nested.rms_norm(x, (4,), p), (4,)),
}
ALL = {**SHARED, **BY_PYTORCH, **BY_US}


def positive(*shape, seed):
    return random(*shape, seed=seed).abs() + 0.5


def with_holes(fill):
    values = positive(8, 4, seed=1)
    values[HOLES] = fill
    return values


def without_holes():
    return torch.nested.nested_tensor_from_jagged(with_holes(0.0)[USED], torch.tensor([0, 2, 5]))


def gradients(function, shape, x, twice):
    """The gradient of the dense argument, that of its square sum if it is to be differentiated twice, and of x."""
    p = positive(*shape, seed=2).requires_grad_()
    y = function(x, p)
    cotangent = torch.ones_like(y)
    found = torch.autograd.grad(y, (p, x), cotangent, create_graph=twice)
    if twice and found[0].requires_grad:
        (again,) = torch.autograd.grad(found[0].square().sum(), p, allow_unused=True)
        return found[0], again, found[1]
    return found[0], None, found[1]


def test_every_operator_with_a_dense_argument_is_here():
    def takes_two(name):
        return sum("Tensor" in str(a.type) for a in operator(name)._schema.arguments) > 1

    served = {name.removeprefix("aten::") for name in replacements["nested"].functions if takes_two(name)}
    others = {
        "scaled_dot_product_attention",
        "_nested_view_from_jagged",
        *BACKWARD,
    }  # no dense argument with a gradient
    assert {name.split(",")[0] for name in SHARED} == served - others


@pytest.mark.parametrize("fill", [7.0, float("nan")], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_gradients_of_a_shared_argument_leave_out_holes(name, fill):
    if name == "nextafter" and not reached("2.13"):
        pytest.skip("this torch has no derivative of nextafter")
    function, shape = ALL[name]
    twice = name not in BY_PYTORCH
    with mg.override("nested"):
        expected = gradients(function, shape, without_holes().requires_grad_(), twice)
        x = torch.nested.nested_tensor_from_jagged(with_holes(fill), OFFSETS, LENGTHS).requires_grad_()
        found = gradients(function, shape, x, twice)
        if name in BY_US:
            x = x.detach().requires_grad_()
            same(gradients(function, shape, x, False)[0], expected[0])
    same(found[0], expected[0])
    if expected[1] is not None:
        same(found[1], expected[1])
    same(found[2].values()[USED], expected[2].values())


def test_holes_hold_the_values_that_pytorch_computes():
    """The places are there, and keep PyTorch's numbers: each function acts on a position by itself."""
    x = torch.nested.nested_tensor_from_jagged(with_holes(7.0), OFFSETS, LENGTHS)
    for function, shape in (SHARED["matmul"], SHARED["add.Tensor"], SHARED["rms_norm"]):
        p = positive(*shape, seed=2)
        expected = function(x, p)
        with mg.override("nested"):
            found = function(x.detach().requires_grad_(), p.requires_grad_())
        assert found.lengths() is expected.lengths()
        same(found.values().detach(), expected.values())


REDUCTIONS = {
    "sum": torch.sum,
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
    "var": torch.var,
    "std": torch.std,
    "vector_norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
}


@pytest.mark.parametrize("dim", [(0, 1), (0, 1, 2), (1,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_leave_out_holes(name, dim):
    reduction = functools.partial(REDUCTIONS[name], dim=dim)
    x = torch.nested.nested_tensor_from_jagged(with_holes(float("nan")), OFFSETS, LENGTHS)
    with mg.override("nested"):
        for tracked in (False, True):
            y, expected = reduction(x.detach().requires_grad_(tracked)), reduction(without_holes())
            same(y.detach(), expected)


PYTORCH_HAS_NO_VALUE = {
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
}


@pytest.mark.parametrize("hole", [7.0, float("nan")])
@pytest.mark.parametrize("reduction", PYTORCH_HAS_NO_VALUE.values(), ids=PYTORCH_HAS_NO_VALUE.keys())
def test_reductions_of_everything_leave_out_holes_where_pytorch_has_no_value(reduction, hole):
    v = with_holes(hole).requires_grad_()
    x = torch.nested.nested_tensor_from_jagged(v, OFFSETS, LENGTHS)
    with pytest.raises(NotImplementedError):
        reduction(x)
    w = v.detach()[USED].requires_grad_()
    expected = torch.autograd.grad(reduction(w), w)[0]
    with mg.override("nested"):
        same(reduction(x.detach()), reduction(w.detach()))
        found = torch.autograd.grad(reduction(x), v)[0]
    same(found, torch.zeros_like(v).index_copy(0, torch.tensor(USED), expected))


def copied(copy, v, **structure):
    return copy(torch.nested.nested_tensor_from_jagged(v, OFFSETS, LENGTHS, **structure))


COPIES = {
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("jagged_dim", [1, 2])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_a_copy_without_holes(copy, jagged_dim):
    """The gradient of PyTorch's has another ragged size than its input, which raises in the backward."""
    v = random(*([1, 8, 4] if jagged_dim == 2 else [8, 4])).requires_grad_()
    expected = v.index_select(jagged_dim - 1, torch.tensor(USED))
    weight = random(*expected.shape)
    with mg.override():
        made = copied(copy, v, jagged_dim=jagged_dim)
        same(made.values(), expected)
        assert made.is_contiguous() and made._lengths is None
        (g,) = torch.autograd.grad((made.values().square() * weight).sum(), v, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), v)
    same(g, torch.zeros_like(v).index_copy(jagged_dim - 1, torch.tensor(USED), 2 * expected * weight))
    same(h, torch.zeros_like(v).index_copy(jagged_dim - 1, torch.tensor(USED), 2 * weight))


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_a_tangent_of_a_copy_without_holes(copy):
    v, tangent = random(8, 4), random(8, 4)
    with mg.override(), torch.autograd.forward_ad.dual_level():
        made = copied(copy, torch.autograd.forward_ad.make_dual(v, tangent))
        found = torch.autograd.forward_ad.unpack_dual(made.values())
    same(found.primal, v[USED])
    same(found.tangent, tangent[USED])


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_a_copy_shares_no_memory(copy):
    """Also where the lengths leave no holes."""
    v = random(5, 4)
    with mg.override():
        made = copy(torch.nested.nested_tensor_from_jagged(v, torch.tensor([0, 2, 5]), torch.tensor([2, 3])))
        made.values().zero_()
    assert v.ne(0).all()
