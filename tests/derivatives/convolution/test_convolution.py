"""Convolution and max pooling: third order, strides, empty batches, and what stays with PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.calls import names_of_nodes
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import jvp, vjp

import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.derivatives.convolution.backends import BACKEND_RULES
from torch_manualgrad.derivatives.samples.convolution import arguments_of
from torch_manualgrad.testing import check

F64 = torch.float64
aten = torch.ops.aten
GEOMETRY = {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}


def by_matmul(x, w):
    """A convolution as a product with the patches."""
    columns = F.unfold(x, w.shape[2:], **GEOMETRY)
    return w.flatten(1) @ columns


# name -> function of two tensors, the same by matrix products
CASES = {
    "conv2d": (lambda x, w: F.conv2d(x, w, **GEOMETRY).flatten(2), by_matmul),
    "conv_tbc": (
        lambda x, w: torch.conv_tbc(x.reshape(4, 2, 15), w.reshape(2, 15, 3), x.new_zeros(3), 1),
        lambda x, w: sum(
            F.pad(x.reshape(4, 2, 15), (0, 0, 0, 0, 1, 1))[k : k + 5] @ w.reshape(2, 15, 3)[k] for k in range(2)
        ),
    ),
    "_slow_conv2d_forward": (
        lambda x, w: aten._slow_conv2d_forward(x, w, w.shape[2:], None, [1, 2], [1, 0]).flatten(2),
        lambda x, w: w.flatten(1) @ F.unfold(x, w.shape[2:], stride=(1, 2), padding=(1, 0)),
    ),
}


def along(f):
    x, w = random(2, 3, 4, 5), random(5, 3, 2, 3, seed=1)
    dx, dw = random(*x.shape, seed=2), random(*w.shape, seed=3)
    return lambda t: f(x + t * dx, w + t * dw).sin().cos().sum()


@pytest.mark.parametrize("name", CASES)
def test_every_nesting_of_the_third_order(name):
    f, reference = CASES[name]
    expected = differentiated(along(reference), "rrr", 0.1)
    with mg.override("*"):
        for nesting in map("".join, itertools.product("fr", repeat=3)):
            found = differentiated(along(f), nesting, 0.1)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=nesting)


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose2d"])
def test_complex_convolutions_are_right_in_every_mode(name):
    """PyTorch makes real ones of them before autograd sees them."""
    x, w = (
        random(*s, dtype=torch.complex128)
        for s in ((1, 2, 4, 3)[: 2 + int(name[-2])], (2, 2, 2, 2)[: 2 + int(name[-2])])
    )
    f = getattr(F, name)
    with mg.override("*"):
        check(f, [(x, w)], checks=("duality",))


def second(f, *given):
    given = [g.detach().requires_grad_() for g in given]
    first = torch.autograd.grad(f(*given).sin().sum(), given, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.cos().sum() for g in first), given)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_and_their_strides_are_pytorchs(layout, groups):
    x = random(2, 4, 5, 5).contiguous(memory_format=layout)
    w, b = random(4, 4 // groups, 3, 3, seed=1).contiguous(memory_format=layout), random(4, seed=2)
    seen = []
    for scope in (mg.override("linalg.det"), mg.override("*")):
        with scope:
            seen.append(second(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=groups), x, w, b))
    torch.testing.assert_close(*seen)
    assert [g.stride() for g in seen[0][:3]] == [g.stride() for g in seen[1][:3]]


def test_empty_batches():
    with mg.override("*"):
        for f in (
            lambda x, w: F.conv2d(x, w),
            lambda x, w: F.conv_transpose2d(x, w),
            lambda x, w: F.max_pool2d(x + w.sum(), 2),
        ):
            x, w = torch.zeros(0, 2, 4, 4, dtype=F64), random(2, 2, 2, 2)
            for g, like in zip(second(f, x, w), (x, w) * 2):
                assert g.shape == like.shape and not g.any()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("channels", "results", "batch"), [(0, 8, 2), (3, 0, 2), (3, 4, 0), (0, 8, 0)])
def test_gradients_without_channels_or_examples_have_the_sizes_of_pytorchs(dims, transposed, channels, results, batch):
    convolution = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    sizes = (channels, results) if transposed else (results, channels)
    given = random(batch, channels, *[6] * dims), random(*sizes, *[2] * dims), random(results)

    def gradients():
        x, w, b = (t.clone().requires_grad_() for t in given)
        y = convolution(x, w, b)
        return [g.shape for g in torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]

    try:
        stock = gradients()
    except RuntimeError:
        pytest.skip("PyTorch has no such convolution")
    with mg.override("*"):
        assert gradients() == stock


def test_a_step_of_a_residual_block_is_pytorchs_own():
    seen = []
    for scope in (mg.override("linalg.det"), mg.override()):
        torch.manual_seed(0)
        block = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
        )
        x = torch.randn(2, 2, 4, 4)
        with scope:
            y = F.adaptive_avg_pool2d(block(x) + F.interpolate(x, scale_factor=0.5).repeat(1, 2, 1, 1), 1)
            y.sum().backward()
        seen.append((names_of_nodes(y.grad_fn), [p.grad for p in block.parameters()]))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1]))


def test_at_a_tie_every_derivative_takes_the_maximum_that_the_operator_chose():
    x = torch.zeros(1, 1, 2, 2, dtype=F64)
    with mg.override("*"):
        gradient = torch.func.grad(lambda x: F.max_pool2d(x, 2).sum())(x)
        tangents = [
            jvp(lambda x: F.max_pool2d(x, 2), (x,), (e.reshape(1, 1, 2, 2),))[1].sum() for e in torch.eye(4, dtype=F64)
        ]
    assert gradient.sum() == 1 and torch.equal(gradient.flatten(), torch.stack(tangents))


# -- rules that no operator of the CPU reaches ------------------------------------------------------------------------


def definition(rule):
    """The operator of a backend by PyTorch's own, of its tensors, and the places of these among its arguments."""
    names = rule.signature.names
    name = rule.name.removeprefix("aten::")

    def geometry(values):
        given = dict(zip(names, values))
        groups = given.get("groups", 2 if "depthwise" in name else 1)
        padding = given.get("output_padding", [0])
        return given["stride"], given["padding"], given.get("dilation", [1]), "transpose" in name, padding, groups

    def forward(values, x, w, *bias):
        return aten.convolution(x, w, *(bias or (None,)), *geometry(values))

    def backward(values, g, x, w):
        pull = vjp(lambda x, w, b: forward(values, x, w, b), x, w, x.new_zeros(g.shape[1]))[1]
        return pull(g)[: len(rule.signature.returns)]

    if "backward" in name:
        return backward, [
            names.index("grad_output"),
            names.index("input" if "input" in names else "self"),
            names.index("weight"),
        ]
    tensors = [n for n in ("self", "input", "weight", "bias") if n in names]
    return forward, [names.index(n) for n in tensors]


@pytest.mark.parametrize("name", [n for n in BACKEND_RULES if "grid" not in n])
def test_the_rules_of_backends_bind(name):
    """Their formulas, given what the CPU's operator returns."""
    rule = BACKEND_RULES[name]
    values = arguments_of(name, F64)
    f, places = definition(rule)
    tensors = [values[i] for i in places]
    outputs = f(values, *tensors)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    cotangents = tuple(random(*o.shape, seed=k) for k, o in enumerate(outputs, 5))
    tangents = tuple(random(*x.shape, seed=k) for k, x in enumerate(tensors, 9))

    def as_tuple(*given):
        found = f(values, *given)
        return (found,) if isinstance(found, torch.Tensor) else tuple(found)

    needed = [i in places for i in range(len(values))]
    kept, static = derivative_of(rule).residuals(values, outputs)
    found = derivative_of(rule).vjp(needed, kept, static, cotangents)
    torch.testing.assert_close([found[i] for i in places], list(vjp(as_tuple, *tensors)[1](cotangents)))
    given = [None] * len(values)
    for i, t in zip(places, tangents):
        given[i] = t
    torch.testing.assert_close(
        tuple(derivative_of(rule).jvp(values, outputs, given)), jvp(as_tuple, tuple(tensors), tangents)[1]
    )


def test_the_rules_of_cudnns_sampling_bind():
    image, grid, g = random(1, 2, 4, 3), random(1, 2, 2, 2, seed=1).tanh(), random(1, 2, 2, 2, seed=2)
    image_t, grid_t, g_t = (random(*x.shape, seed=k) for k, x in enumerate((image, grid, g), 3))

    def forward(image, grid):
        return aten.grid_sampler_2d(image, grid, 0, 0, True)

    def backward(image, grid, g):
        return vjp(forward, image, grid)[1](g)

    with mg.override():
        for name, f, values, tangents, cotangents in (
            ("cudnn_grid_sampler", forward, (image, grid), (image_t, grid_t), (g,)),
            ("cudnn_grid_sampler_backward", backward, (image, grid, g), (image_t, grid_t, g_t), (image_t, grid_t)),
        ):
            derivative = derivative_of(BACKEND_RULES[name])
            kept, static = derivative.residuals(values, (None,) * len(cotangents))
            found = derivative.vjp([True] * len(values), kept, static, cotangents)
            pull = vjp(f, *values)[1]
            expected = pull(cotangents if len(cotangents) > 1 else cotangents[0])
            torch.testing.assert_close(tuple(found), expected)
            expected = jvp(f, values, tangents)[1]
            found = derivative.jvp(values, (None,) * len(cotangents), tangents)
            torch.testing.assert_close(
                found if len(found) > 1 else found[0], expected if len(found) == 1 else list(expected)
            )
