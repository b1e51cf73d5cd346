"""Normalizations of special inputs, and as modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.normalizations import EPS, F64, composite, second
from helpers.tensors import random
from torch.func import functional_call, hessian, jacrev

import torch_manualgrad as mg

# -- special inputs ---------------------------------------------------------------------------------------------------


def test_empty_batches():
    w, b = random(3), random(3, seed=1)
    with mg.override("*"):
        for f, x in (
            (lambda x, w, b: F.layer_norm(x, [3], w, b), torch.zeros(0, 3, dtype=F64)),
            (lambda x, w, b: F.batch_norm(x, w.detach(), b.detach() ** 2, w, b), torch.zeros(0, 3, dtype=F64)),
            (
                lambda x, w, b: torch.native_batch_norm(x, w, b, w.detach(), b.detach() ** 2, False, 0.1, EPS)[0],
                torch.zeros(0, 3, dtype=F64),  # on which PyTorch's backward ends the process
            ),
        ):
            for g, like in zip(second(f, x, w, b), (x, w, b) * 2):
                assert g.shape == like.shape and not g.any()


def test_constant_rows():
    """The variance is 0, and r = eps^-1/2; with eps = 0 nothing is defined."""
    x = torch.full((2, 4), 3.0, dtype=F64)
    with mg.override("*"):
        H = hessian(lambda x: F.layer_norm(x, [4], eps=EPS).square().sum())(x)
    torch.testing.assert_close(H, hessian(lambda x: composite(x, (1,), 1.0, 0.0).square().sum())(x))


@pytest.mark.parametrize("size", [1e6, 1e-6])
def test_sizes_far_from_one(size):
    x = (size * random(3, 5)).requires_grad_()
    W = random(3, 5, seed=1)
    seen = []
    with mg.override("*"):
        for f in (lambda x: F.layer_norm(x, [5], eps=1e-5), lambda x: composite_with(x, 1e-5)):
            (g,) = torch.autograd.grad((W * f(x)).sum(), x, create_graph=True)
            seen.append((g, *torch.autograd.grad((W * g).sum(), x)))
    for a, e in zip(*seen):
        torch.testing.assert_close(a / e.abs().max(), e / e.abs().max(), rtol=1e-7, atol=1e-7)


def composite_with(x, eps):
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()


def test_a_gradient_of_running_statistics_raises():
    x, mean, variance = random(5, 3), random(3), random(3, seed=1).square().requires_grad_()
    with mg.override("*"), pytest.raises(NotImplementedError):
        F.batch_norm(x.requires_grad_(), mean, variance).sum().backward()


# -- modules ----------------------------------------------------------------------------------------------------------

nn = torch.nn
MODULES = {
    "LayerNorm": (nn.LayerNorm(3), (2, 3), (1,)),
    "BatchNorm1d": (nn.BatchNorm1d(3), (4, 3), (0,)),
    "BatchNorm2d": (nn.BatchNorm2d(2), (2, 2, 1, 2), (0, 2, 3)),
    "BatchNorm1d in evaluation": (nn.BatchNorm1d(3).eval(), (4, 3), None),
    "GroupNorm": (nn.GroupNorm(1, 2), (2, 2, 2), (1, 2)),
    "InstanceNorm2d": (nn.InstanceNorm2d(2, affine=True), (1, 2, 2, 2), (2, 3)),
    "RMSNorm": (nn.RMSNorm(3), (2, 3), None),
}


def by_hand(module, dims, x, weight, bias):
    shape = (-1, *[1] * (x.dim() - 2)) if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else (-1,)
    w = weight.reshape(shape)
    if isinstance(module, nn.RMSNorm):
        return x * (x.square().mean(-1, keepdim=True) + torch.finfo(F64).eps).rsqrt() * w
    if dims is None:
        return (x - module.running_mean) * (module.running_var + module.eps).rsqrt() * w + bias
    rest = x - x.mean(dims, keepdim=True)
    return rest * (rest.square().mean(dims, keepdim=True) + module.eps).rsqrt() * w + bias.reshape(shape)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
def test_modules(name, which):
    module, shape, dims = MODULES[name]
    module = module.double()
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    parameters = {n: random(*p.shape, seed=k) for k, (n, p) in enumerate(module.named_parameters())}
    x, W = random(*shape, seed=5), random(*shape, seed=6)

    def f(x, *values):
        state = {**{n: b.clone() for n, b in buffers.items()}, **dict(zip(parameters, values))}
        return functional_call(module, state, (x,))

    given = (x, *parameters.values())
    leaves = [g.clone().requires_grad_() for g in given]

    def loss(g):
        return lambda *given: (W * g(*given).sin()).sum()

    def reference(x, weight, bias=None):
        return by_hand(module, dims, x, weight, bias)

    argnums = tuple(range(len(given)))
    with mg.override(*which):
        assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True)
        found = hessian(loss(f), argnums)(*given)
        again = jacrev(jacrev(loss(f), argnums), argnums)(*given)
    expected = hessian(loss(reference), argnums)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-9)
