"""Norms and activations of nested tensors: all modes, special components, PyTorch's own nested tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import rounded

import torch_manualgrad as mg
from torch_manualgrad import nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import CHECKS, Sample, check


def batch(*tail, lengths=(3, 0, 5), lead=(), dtype=torch.float64, offsets=torch.int64, seed=0):
    at = torch.tensor([0, *lengths]).cumsum(0).to(offsets)
    return Ragged(rounded(*lead, sum(lengths), *tail, dtype=dtype, seed=seed), at, (len(lengths), *lead, None, *tail))


def flat(*tail, sizes=((2, 3), (1, 0), (3, 1))):
    """Two ragged dims."""
    table = torch.tensor(sizes)
    counts = table.prod(1) * torch.Size(tail).numel()
    at = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Ragged(rounded(int(at[-1])), at, (len(sizes), None, None, *tail), table)


def assert_by_components(found, given, f):
    for a, b in zip(found.components(), given.components(), strict=True):
        torch.testing.assert_close(a, f(b))


# -- norms ------------------------------------------------------------------------------------------------------------

RAGGED = {
    "ragged first": batch(4),
    "dims in front": batch(4, lead=(2,), offsets=torch.int32),
    "a dim between": batch(3, 4),
}


@pytest.mark.parametrize("x", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_layer_norm_in_every_mode(x, parameters):
    given = [rounded(4, seed=i + 1) for i in range(parameters)]
    report = check(lambda v, *p: nested.layer_norm(x.like(v), [4], *p).values, [Sample(x.values, *given)])
    assert report
    assert_by_components(nested.layer_norm(x, [4], *given), x, lambda c: F.layer_norm(c, [4], *given))


@pytest.mark.parametrize("parameters", [0, 1])
def test_rms_norm_in_every_mode(parameters):
    x, given = batch(3, 4), [rounded(3, 4, seed=i + 1) for i in range(parameters)]
    check(lambda v, *p: nested.rms_norm(x.like(v), [3, 4], *p).values, [Sample(x.values, *given)])
    assert_by_components(nested.rms_norm(x, [3, 4], *given), x, lambda c: F.rms_norm(c, [3, 4], *given))
    given_eps = nested.rms_norm(x, [3, 4], *given, eps=0.5)
    assert_by_components(given_eps, x, lambda c: F.rms_norm(c, [3, 4], *given, eps=0.5))


def test_layer_norm_over_two_dims_and_with_a_bias_only():
    x, weight, bias = batch(3, 4), rounded(3, 4, seed=1), rounded(3, 4, seed=2)
    check(lambda v, b: nested.layer_norm(x.like(v), [3, 4], None, b).values, [Sample(x.values, bias)])
    found = nested.layer_norm(x, [3, 4], weight, bias, 0.1)
    assert_by_components(found, x, lambda c: F.layer_norm(c, [3, 4], weight, bias, 0.1))


def test_layer_norm_over_the_ragged_dim():
    x = batch(4, lead=(2,), lengths=(3, 0, 1, 4))
    check(lambda v: nested.layer_norm(x.like(v), [None, 4]).values, [Sample(x.values)])
    assert_by_components(
        nested.layer_norm(x, [None, 4]), x, lambda c: F.layer_norm(c, c.shape[-2:]) if c.numel() else c
    )
    assert_by_components(nested.layer_norm(x, [2, None, 4]), x, lambda c: F.layer_norm(c, c.shape) if c.numel() else c)


def test_norms_with_several_ragged_dims():
    x = flat(4)
    check(lambda v: nested.layer_norm(x.like(v), [4]).values, [Sample(x.values)])
    assert_by_components(nested.layer_norm(x, [4]), x, lambda c: F.layer_norm(c, [4]))
    assert_by_components(nested.rms_norm(x, [4]), x, lambda c: F.rms_norm(c, [4]))


@pytest.mark.parametrize("norm", [nested.layer_norm, nested.rms_norm])
def test_norms_are_compiled(norm):
    x = batch(4)
    check(lambda v, w: norm(x.like(v), [4], w).values, [Sample(x.values, rounded(4))], modes=(), checks=["compile"])


def test_the_second_derivative_in_forward_mode_is_right_where_pytorch_is_wrong():
    x, t = rounded(5, 4), rounded(5, 4, seed=1)
    r = Ragged(x, torch.tensor([0, 2, 5]), (2, None, 4))

    def curvature(f):
        along = lambda y: torch.func.jvp(f, (y,), (t,))[1]  # noqa: E731
        return torch.func.jvp(along, (x,), (t,))[1]

    def written_out(v):
        centred = v - v.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    right = curvature(written_out)
    torch.testing.assert_close(curvature(lambda v: nested.layer_norm(r.like(v), [4]).values), right)
    assert (curvature(lambda v: F.layer_norm(v, [4])) - right).abs().max() > 1e-3


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_third_order_of_norms_where_pytorch_is_wrong(norm):
    x = rounded(2, 3)
    r = Ragged(x, torch.tensor([0, 2]), (1, None, 3))

    def written_out(v):
        centred = v - v.mean(-1, keepdim=True) if norm == "layer_norm" else v
        return centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()

    def third(f, *modes):
        f = lambda v, f=f: f(v).pow(2)  # noqa: E731
        for mode in modes:
            f = mode(f)
        return f(x)

    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    right = third(written_out, rev, rev, rev)
    for modes in itertools.product((rev, fwd), repeat=3):
        torch.testing.assert_close(
            third(lambda v: getattr(nested, norm)(r.like(v), [3], eps=0.1).values, *modes), right
        )
    if norm == "layer_norm":  # even by reverse mode alone
        assert (third(lambda v: F.layer_norm(v, [3], eps=0.1), rev, rev, rev) - right).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norms_in_lower_precision(dtype, norm):
    ours = getattr(nested, norm.__name__)
    x = batch(8, dtype=dtype)
    exact = x.values.double().requires_grad_()
    values = x.values.clone().requires_grad_()
    parameters = [rounded(8, dtype=dtype).requires_grad_() for _ in range(2 if norm is F.layer_norm else 1)]
    wide = [p.detach().double().requires_grad_() for p in parameters]
    y, z = ours(x.like(values), [8], *parameters, eps=1e-5).values, norm(exact, [8], *wide, eps=1e-5)
    weights = rounded(*x.values.shape, seed=3)
    (y * weights.to(dtype)).sum().backward()
    (z * weights.to(dtype).double()).sum().backward()
    assert y.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    for a, b in [(values.grad, exact.grad), *[(p.grad, w.grad) for p, w in zip(parameters, wide, strict=True)]]:
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * 4)
    # and twice
    torch.func.jvp(torch.func.grad(lambda v: ours(x.like(v), [8]).values.sum()), (x.values,), (x.values,))


def test_layer_norm_with_float32_parameters_of_a_bfloat16_input():
    x, weight = batch(8, dtype=torch.bfloat16), rounded(8, dtype=torch.float32).requires_grad_()
    nested.layer_norm(x, [8], weight).values.float().square().sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("shape, offsets", [((0, 4), [0]), ((0, 4), [0, 0, 0]), ((2, 1), [0, 1, 2])])
def test_norms_of_nothing_and_of_one(shape, offsets):
    x = Ragged(rounded(*shape), torch.tensor(offsets), (len(offsets) - 1, None, shape[1]))
    for norm in (nested.layer_norm, nested.rms_norm):
        values, weight = x.values.clone().requires_grad_(), rounded(shape[1]).requires_grad_()
        norm(x.like(values), [shape[1]], weight).values.sum().backward()
        assert values.grad.shape == x.values.shape and not values.grad.isnan().any()
        assert weight.grad.shape == weight.shape


def test_layer_norm_backward_is_the_formula():
    x, weight = rounded(5, 4), rounded(4, seed=1)
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, [4], weight, weight, 1e-5)
    g = rounded(5, 4, seed=2)
    found = mg.ops.layer_norm_backward_nested(g, x, [4], mean, rstd, weight, [True, True, True])
    body = mg.ops.layer_norm_backward_nested.reference(g, x, [4], mean, rstd, weight, [True, True, True])
    for i, (a, b) in enumerate(zip(found, body, strict=True)):
        torch.testing.assert_close(a, b)
        masked = mg.ops.layer_norm_backward_nested(g, x, [4], mean, rstd, weight, [j == i for j in range(3)])
        torch.testing.assert_close(masked[i], a)
        assert all(m.numel() == 0 for j, m in enumerate(masked) if j != i)
    xs = [x.clone().requires_grad_(), weight.clone().requires_grad_(), weight.clone().requires_grad_()]
    r = Ragged(x, torch.tensor([0, 5]), (1, None, 4))
    nested.layer_norm(r.like(xs[0]), [4], *xs[1:]).values.backward(g)
    for x_, a in zip(xs, found, strict=True):
        torch.testing.assert_close(x_.grad, a)


@pytest.mark.parametrize("wanted", [[True, True], [True, False], [False, True]])
@pytest.mark.parametrize("with_weight", [True, False])
def test_rms_norm_backward_kernel_against_its_body(wanted, with_weight):
    x, g, weight = rounded(5, 4), rounded(5, 4, seed=2), rounded(4, seed=1) if with_weight else None
    rstd = (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    found = mg.ops.rms_norm_backward_nested(g, x, [4], rstd, weight, wanted)
    body = mg.ops.rms_norm_backward_nested.reference(g, x, [4], rstd, weight, wanted)
    for a, b in zip(found, body, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nested.layer_norm(batch(4), [3]), r"normalized_shape: \[3\]"),
        (lambda: nested.layer_norm(batch(4), [3, None, 4]), "normalized_shape"),
        (lambda: nested.layer_norm(batch(4), [4], rounded(3)), r"weight: expected shape \[4\], got \[3\]"),
        (lambda: nested.layer_norm(batch(4), [4], None, rounded(4, 1)), "bias: expected shape"),
        (lambda: nested.layer_norm(batch(4), [None, 4], rounded(4)), "weight and bias"),
        (lambda: nested.rms_norm(batch(4), []), r"normalized_shape: \[\]"),
    ],
)
def test_norms_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_norms_refuse_integers():
    x = Ragged(torch.arange(8).reshape(4, 2), torch.tensor([0, 4]), (1, None, 2))
    for shape in ([2], [None, 2]):
        with pytest.raises(TypeError, match="floating point"):
            nested.layer_norm(x, shape)


# -- activations ------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": (),
    "gelu": (),
    "gelu tanh": ("tanh",),
    "silu": (),
    "threshold": (0.3, -2.0),
    "leaky_relu": (0.2,),
    "hardtanh": (-0.7, 1.1),
    "elu": (1.5,),
    "selu": (),
    "celu": (0.7,),
    "softplus": (1.5,),
    "mish": (),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_every_mode(name):
    f, rest = getattr(nested, name.split()[0]), ACTIVATIONS[name]
    options = {"approximate": rest[0]} if name == "gelu tanh" else {}
    rest = () if options else rest
    x = batch(2, lead=(2,))
    check(lambda v: f(x.like(v), *rest, **options).values, [Sample(2 * x.values)], checks=(*CHECKS, "compile"))
    dense = getattr(F, name.split()[0])
    for given in (x, flat(2)):
        assert_by_components(f(given, *rest, **options), given, lambda c: dense(c, *rest, **options))
    half = batch(2, dtype=torch.bfloat16)
    torch.testing.assert_close(
        f(half, *rest, **options).values, dense(half.values, *rest, **options), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize(
    "formula, rest, dense",
    [
        ("gelu_backwards_nested", ("none",), F.gelu),
        ("gelu_backwards_nested", ("tanh",), lambda x: F.gelu(x, approximate="tanh")),
        ("silu_backward_nested", (), F.silu),
        ("threshold_backwards_nested", (0.3,), lambda x: F.threshold(x, 0.3, -1.0)),
        ("threshold_backwards_nested", (0.0,), F.relu),
    ],
)
def test_backward_formulas_are_the_gradients(formula, rest, dense):
    x, g = rounded(6, 3), rounded(6, 3, seed=1)
    f = getattr(mg.ops, formula)
    y = x.clone().requires_grad_()
    dense(y).backward(g)
    torch.testing.assert_close(f(g, x, *rest), y.grad)
    torch.testing.assert_close(f.reference(g, x, *rest), y.grad)
    check(lambda g, x: f(g, x, *rest), [Sample(g, x)], name=formula)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "gelu", "silu", "relu"])
def test_on_torch_nested_tensors(layout, name):
    rest = ([4],) if "norm" in name else ()
    parts = [rounded(n, 4, seed=n).requires_grad_() for n in (2, 3)]
    copies = [p.detach().clone().requires_grad_() for p in parts]
    y = getattr(nested, name)(torch.nested.as_nested_tensor(parts, layout=layout), *rest)
    assert y.is_nested and y.layout is layout
    torch.cat([c.flatten() for c in y.unbind()]).square().sum().backward()
    for p, c in zip(parts, copies, strict=True):
        getattr(F, name)(c, *rest).square().sum().backward()
        torch.testing.assert_close(p.grad, c.grad)
