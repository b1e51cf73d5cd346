"""Grid sampling beside the sum over all pixels with the interpolating kernel as weight, and beside PyTorch's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.calls import names_of_nodes
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import jvp

import torch_manualgrad as mg

F64 = torch.float64
BILINEAR, NEAREST, BICUBIC = 0, 1, 2
aten = torch.ops.aten


def kernel(t, mode):
    """The weight of a pixel at a distance t."""
    t = torch.where(t < 0, -t, t)
    if mode == BILINEAR:
        return torch.where(t < 1, 1 - t, 0)
    a = -0.75
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * (t**3 - 5 * t**2 + 8 * t - 4)
    return torch.where(t < 1, near, torch.where(t < 2, far, 0))


def by_sums(image, grid, mode, align_corners):
    """With zeros outside."""
    found, sizes = image, image.shape[2:]
    for k, size in enumerate(sizes):
        c = grid.flatten(1, -2)[..., len(sizes) - 1 - k]
        u = (c + 1) * (size - 1) / 2 if align_corners else ((c + 1) * size - 1) / 2
        w = kernel(u[..., None] - torch.arange(size), mode)  # (N, P, size)
        if k == 0:
            found = torch.einsum("nci...,npi->ncp...", found, w)
        else:
            found = torch.einsum("ncpi...,npi->ncp...", found, w)
    return found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("padding_mode", [0, 1, 2])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_point_that_is_nowhere_is_given_no_memory(dims, padding_mode, value):
    """Where padding moves a point to nan, PyTorch's kernel for the CPU leaves its memory; it gets no cotangent."""
    image, grid = random(1, 2, *(4, 3, 5)[:dims]), random(1, *[2] * dims, dims, seed=1).tanh()
    grid[(0,) * (dims + 1)] = value
    backward = getattr(mg.ops, f"grid_sampler_{dims}d_backward")
    g = random(1, 2, *[2] * dims, seed=2)
    found = backward(g, image, grid, BILINEAR, padding_mode, True, [True, True])
    if value != value or padding_mode == 2:
        expected = backward.reference(g, image, grid, BILINEAR, padding_mode, True, [True, True])
        for a, b in list(zip(found, expected))[: 2 if dims == 2 and padding_mode else 0]:
            torch.testing.assert_close(a, b)
    assert found[0].isfinite().all()


CASES = {
    "bilinear": (2, BILINEAR, False),
    "bilinear, aligned": (2, BILINEAR, True),
    "bicubic": (2, BICUBIC, False),
    "bicubic, aligned": (2, BICUBIC, True),
    "trilinear": (3, BILINEAR, False),
}


def along(f, dims):
    """A smooth loss on a line through image and grid."""
    image, grid = random(2, 2, *(4, 3, 5)[:dims]), (0.6 * random(2, *[2] * dims, dims, seed=1)).tanh()
    d_image, d_grid = random(*image.shape, seed=2), 0.2 * random(*grid.shape, seed=3)
    W = random(2, 2, 2**dims, seed=4)
    return lambda t: (W * f(image + t * d_image, grid + t * d_grid).reshape(W.shape).sin()).sum()


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("name", CASES)
def test_every_nesting_up_to_the_third_order(name, which):
    dims, mode, align_corners = CASES[name]
    expected = [
        differentiated(along(lambda x, g: by_sums(x, g, mode, align_corners), dims), "r" * order, 0.01)
        for order in (1, 2, 3)
    ]
    with mg.override(*which):
        loss = along(lambda x, g: aten.grid_sampler(x, g, mode, 0, align_corners), dims)
        for nesting in ("".join(n) for order in (1, 2, 3) for n in itertools.product("fr", repeat=order)):
            found = differentiated(loss, nesting, 0.01)
            torch.testing.assert_close(found, expected[len(nesting) - 1], rtol=1e-9, atol=1e-9, msg=nesting)


def test_third_order_of_the_plain_graph():
    """Three times torch.autograd.grad: the plain call stays with PyTorch, and its backward does not."""
    expected = differentiated(along(lambda x, g: by_sums(x, g, BICUBIC, False), 2), "rrr", 0.01)
    t = torch.tensor(0.01, dtype=F64, requires_grad=True)
    with mg.override():
        y = along(lambda x, g: aten.grid_sampler(x, g, BICUBIC, 0, False), 2)(t)
        for _ in range(3):
            (y,) = torch.autograd.grad(y, t, create_graph=True)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


SIZES = {2: (3, 4), 3: (2, 3, 4)}
MODES = [
    (dims, *modes) for dims in (2, 3) for modes in itertools.product((0, 1, 2)[: 5 - dims], (0, 1, 2), (False, True))
]


def backward_of(dims):
    return getattr(mg.ops, f"grid_sampler_{dims}d_backward"), getattr(aten, f"grid_sampler_{dims}d_backward")


@pytest.mark.parametrize("dims, mode, padding, align_corners", MODES)
def test_the_body_of_the_backward_is_pytorchs_operator(dims, mode, padding, align_corners):
    """Far outside, too, where a reflection goes back and forth."""
    image, grid = random(2, 3, *SIZES[dims]), 3 * random(2, *[3] * dims, dims, seed=1)
    g = random(2, 3, *[3] * dims, seed=2)
    ours, stock = backward_of(dims)
    found = ours.reference(g, image, grid, mode, padding, align_corners, [True, True])
    torch.testing.assert_close(found, stock(g, image, grid, mode, padding, align_corners, [True, True]))


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("mode", [BILINEAR, NEAREST, BICUBIC])
def test_no_coordinate_reads_outside_of_the_image(mode, padding):
    image = random(1, 1, 2, 3)
    grid = torch.tensor([math.nan, math.inf, -math.inf, 1e300, -1e300, 0.1], dtype=F64).expand(2, -1).T
    grid = grid.reshape(1, 1, 6, 2).contiguous()
    tangent = mg.ops.grid_sampler_jvp(image, image, grid, torch.ones_like(grid), mode, padding, False)
    assert tangent[..., -1].isfinite().all()
    found = backward_of(2)[0].reference(
        torch.ones(1, 1, 1, 6, dtype=F64), image, grid, mode, padding, False, [True] * 2
    )
    assert found[1][..., -1, :].isfinite().all()


def test_a_plain_training_step_is_pytorchs_own():
    seen = []
    for scope in (mg.override("linalg.det"), mg.override()):
        image, grid = random(1, 2, 3, 4).requires_grad_(), random(1, 2, 2, 2, seed=1).tanh().requires_grad_()
        with scope:
            y = F.grid_sample(image, grid, align_corners=False)
            y.sin().sum().backward()
        seen.append((names_of_nodes(y.grad_fn), image.grad, grid.grad))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1]) and torch.equal(seen[0][2], seen[1][2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_against_double(dtype):
    given = [random(1, 2, 3, 4).to(dtype), random(1, 2, 2, 2, seed=1).tanh().to(dtype)]
    tangents = [random(1, 2, 3, 4, seed=2).to(dtype), random(1, 2, 2, 2, seed=3).to(dtype)]
    exact = mg.ops.grid_sampler_jvp(*[x.double() for x in (given[0], tangents[0], given[1], tangents[1])], 0, 0, False)
    found = mg.ops.grid_sampler_jvp(given[0], tangents[0], given[1], tangents[1], 0, 0, False)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_an_empty_batch():
    image, grid = torch.zeros(0, 2, 3, 4, dtype=F64), torch.zeros(0, 2, 2, 2, dtype=F64)
    with mg.override("*"):
        assert jvp(lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False), (image, grid), (image, grid))[1].shape == (
            0, 2, 2, 2,
        )  # fmt: skip


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("padding", ["border", "reflection"])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_point_that_is_lost_is_not_given_to_pytorchs_bilinear_backward(dims, padding, bad):
    """That kernel writes outside of its memory there. The gradient of a loss of finite results is that of the other points."""
    image, grid = random(1, 2, *[4] * dims).requires_grad_(), random(1, *[3] * dims, dims, seed=1).tanh()
    grid[(0,) * (dims + 1)] = bad
    grid.requires_grad_()
    with mg.override():
        y = F.grid_sample(image, grid, padding_mode=padding, align_corners=False)
        kept = (slice(None), slice(None), *[slice(1, None)] * dims)
        found = torch.autograd.grad(y[kept].sin().sum(), (image, grid))
    others = grid.detach()[(slice(None), *[slice(1, None)] * dims)].clone().requires_grad_()
    y = F.grid_sample(image, others, padding_mode=padding, align_corners=False)
    of_image, of_others = torch.autograd.grad(y.sin().sum(), (image, others))
    torch.testing.assert_close(found[0], of_image)
    torch.testing.assert_close(found[1][(slice(None), *[slice(1, None)] * dims)], of_others)
    assert found[1].isfinite().all()
