"""Dropout, rrelu, masked softmax and weight normalization, beside the same by elementary operators."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.calls import is_pytorchs
from helpers.tensors import random
from helpers.transforms import differentiated
from torch import nn
from torch.func import functional_call, hessian

import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.derivatives.nn.dropout import FUSED_DROPOUT

F64 = torch.float64
ATEN = torch.ops.aten
NESTINGS = ["".join(n) for order in (1, 2, 3) for n in itertools.product("fr", repeat=order)]


def seeded(f):
    def call(*args):
        torch.manual_seed(0)
        return f(*args)

    return call


MASK = torch.eye(4, 3, dtype=torch.bool)


def masked(x, mask):
    return x.masked_fill(mask, -torch.inf).softmax(-1)


KEPT = seeded(lambda: torch.native_dropout(torch.ones(4, 3, dtype=F64), 0.4, True)[1])()
NOISE = seeded(
    lambda: ATEN.rrelu_with_noise_functional(random(4, 3), torch.zeros(4, 3, dtype=F64), 0.1, 0.4, True)[1]
)()


def dropout(train):
    return seeded(lambda x: torch.native_dropout(x, 0.4, train)[0])


def rrelu(x):
    torch.manual_seed(0)
    return ATEN.rrelu_with_noise_functional(x, torch.zeros_like(x), 0.1, 0.4, True)[0]


# name -> (function of x of shape (4, 3), the same by elementary operators)
CASES = {
    "dropout": (dropout(True), lambda x: x * KEPT / 0.6),
    "dropout, train not given": (dropout(None), lambda x: x * KEPT / 0.6),
    "rrelu": (rrelu, lambda x: x * NOISE),
    "masked softmax": (lambda x: ATEN._masked_softmax(x, MASK, 1, 2), lambda x: masked(x, MASK)),
    "masked softmax of pairs": (
        lambda x: ATEN._masked_softmax(x[None, None, :3], MASK[:3], 3, 0), lambda x: masked(x[:3], MASK[:3])[None, None]
    ),
    "weight normalization": (
        lambda x: torch._weight_norm(x, 2 + x[:, :1].sin(), 0),
        lambda x: (2 + x[:, :1].sin()) * x / x.square().sum(1, keepdim=True).sqrt(),
    ),
    "weight normalization, last": (
        lambda x: torch._weight_norm(x, 2 + x[:1].sin(), 1),
        lambda x: (2 + x[:1].sin()) * x / x.square().sum(0, keepdim=True).sqrt(),
    ),
}  # fmt: skip


def loss_along(f):
    """A smooth loss on a line, on which no entry changes its sign: a function of one number."""
    x, d = random(4, 3), 0.1 * random(4, 3, seed=3) * random(4, 3).abs()
    W = random(*f(x).shape, seed=6)
    return lambda t: (W * f(x + t * d).sin()).sum()


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("name", CASES)
def test_every_nesting_to_third_order(name, which):
    f, reference = CASES[name]
    known = [differentiated(loss_along(reference), "r" * order, 0.2) for order in (1, 2, 3)]
    with mg.override(*which):
        for nesting in NESTINGS:
            found = differentiated(loss_along(f), nesting, 0.2)
            torch.testing.assert_close(found, known[len(nesting) - 1], rtol=1e-8, atol=1e-10, msg=nesting)


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


@pytest.mark.parametrize("name", ["dropout, train not given", "rrelu"])
def test_where_the_first_gradient_of_pytorch_is_wrong(name):
    f, reference = CASES[name]
    expected = gradient(reference, random(4, 3))
    assert not torch.allclose(gradient(f, random(4, 3)), expected)
    with mg.override():
        torch.testing.assert_close(gradient(f, random(4, 3)), expected)


def test_the_second_derivative_of_weight_normalization():
    """PyTorch takes the norm for a constant."""
    v, g = random(3, 4), random(3, 1, seed=1)

    def second(f):
        x = v.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.cos().sum(), x)[0]

    expected = second(lambda v: g * v / v.square().sum(1, keepdim=True).sqrt())
    assert not torch.allclose(second(lambda v: torch._weight_norm(v, g)), expected)
    with mg.override():
        torch.testing.assert_close(second(lambda v: torch._weight_norm(v, g)), expected)


@pytest.mark.parametrize("size", [1e-170, 1e170])
def test_norms_whose_squares_overflow(size):
    """The saved norm is the scale; PyTorch's own forward overflows."""
    v, g = random(3, 4), random(3, 1, seed=1)
    norms = size * v.norm(dim=1, keepdim=True)
    t = random(3, 4, seed=2)
    found = mg.ops.weight_norm_jvp(size * v, size * t, g, None, norms, 0)
    torch.testing.assert_close(found, mg.ops.weight_norm_jvp(v, t, g, None, norms / size, 0))


def test_a_row_without_anything_left():
    """PyTorch gives nan there, and a gradient of 0."""
    mask = torch.tensor([[True, True], [False, True]])
    x = random(2, 2)

    def loss(x):
        return ATEN._masked_softmax(x, mask, 1, 2)[1].square().sum()

    with mg.override("*"):
        assert hessian(loss)(x).isfinite().all()
        y = ATEN._masked_softmax(leaf := x.clone().requires_grad_(), mask, 1, 2)
        assert y[0].isnan().all() and not torch.autograd.grad(y.sum(), leaf)[0][0].any()


@pytest.mark.parametrize(
    "make", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["hook", "parametrization"]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_normalization_of_a_layer(make):
    x, layer = random(5, 3), make(nn.Linear(3, 2).double())
    names = [n for n, _ in layer.named_parameters()]
    parameters = [random(*p.shape, seed=i).requires_grad_() for i, p in enumerate(layer.parameters())]
    with mg.override():
        assert torch.autograd.gradgradcheck(
            lambda *given: functional_call(layer, dict(zip(names, given)), (x,)).sin(),
            parameters,
            check_fwd_over_rev=True,
        )


def test_dropout_of_a_network_stays_pytorchs_own():
    x = random(4, 3).requires_grad_()
    with mg.override():
        assert is_pytorchs(torch.native_dropout(x, 0.4, True)[0].grad_fn)
        assert is_pytorchs(F.dropout(x, 0.4).grad_fn)


def test_the_rule_of_gpus_binds():
    x, mask = random(4, 3), random(4, 3, seed=1) > 0
    tensors, static = derivative_of(FUSED_DROPOUT).residuals((x, 0.6, None), (x, mask))
    found = derivative_of(FUSED_DROPOUT).vjp((True, False, False), tensors, static, (x, None))
    torch.testing.assert_close(found[0], x * mask / 0.6)
    torch.testing.assert_close(
        derivative_of(FUSED_DROPOUT).jvp((x, 0.6, None), (x, mask), (x, None, None))[0], found[0]
    )
