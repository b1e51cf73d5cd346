"""Programs whose compiled gradients were wrong, missing or refused, by the number of PyTorch's issue where there is one."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.programs import draw
from torch import Tensor
from torch.autograd import forward_ad as fwAD

import torch_manualgrad as mg

ISSUES = {}


def issue(number):
    """By number or name. An entry is a program of a wrapper, which compiles a function or returns it as it is."""

    def register(program):
        ISSUES[number] = program
        return program

    return register


def gradients(function, *shapes):
    """Gradients of all orders up to two."""
    inputs = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    first = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
    return *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)


class Zero(torch.autograd.Function):
    """The sine, whose derivatives are said to be zero."""

    generate_vmap_rule = True
    forward = staticmethod(lambda x: x.sin())
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: torch.zeros_like(g))
    jvp = staticmethod(lambda ctx, t: torch.zeros_like(t))


@issue(193061)
def modulated_layer_norms_that_share_a_table(wrap):
    def f(x: Tensor, table: Tensor) -> Tensor:
        a, b, c, d = table.chunk(4, 1)
        h = F.layer_norm(x, (8,)) * (1 + a) + b
        return F.layer_norm(h, (8,)) * (1 + c) + d

    return gradients(wrap(f), (2, 3, 8), (1, 32))


@issue(185509)
def interpolation_convolution_pooling_and_a_mask(wrap):
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
        conv = F.conv2d(y[:, :, 1:7, 1:8], w, b, padding=1)
        pool = F.max_pool2d(conv, 3, 1, 1)
        return torch.where(conv.detach() > pool.detach().mean((2, 3), keepdim=True), conv, pool)

    return gradients(wrap(f), (1, 2, 5, 6), (3, 2, 3, 3), (3,))


@issue(183602)
def diagonal_scatter(wrap):
    return gradients(wrap(lambda x, s: torch.diagonal_scatter(x, s).sum()), (5, 5), (5,))


@issue(180164)
def slice_scatter_and_a_sum(wrap):
    return gradients(wrap(lambda x, y: torch.slice_scatter(x, y, 1, 0, 2).sum(1)), (4, 5), (4, 2))


@issue(183898)
def slice_scatter_in_the_middle(wrap):
    return gradients(wrap(lambda x, y: torch.slice_scatter(x, y, 0, 1, 4).sum()), (6,), (3,))


@issue(187284)
def tangents_of_dual_numbers(wrap):
    with fwAD.dual_level():
        y = wrap(lambda x: (x**2).sum())(fwAD.make_dual(draw(3), draw(3, seed=1)))
        return fwAD.unpack_dual(y).tangent


@issue(192985)
def a_jvp_of_a_function_inside_of_a_transform(wrap):
    return wrap(lambda x, t: torch.func.jvp(Zero.apply, (x,), (t,))[1])(draw(3), draw(3, seed=1))


@issue(193277)
def a_jvp_of_a_function_and_dual_numbers(wrap):
    with fwAD.dual_level():
        return fwAD.unpack_dual(wrap(lambda x: Zero.apply(x))(fwAD.make_dual(draw(3), draw(3)))).tangent


@issue(193279)
def a_backward_of_a_function_inside_of_a_transform(wrap):
    return wrap(torch.func.grad(lambda x: Zero.apply(x).sum()))(draw(3))


@issue(136662)
def writes_inside_of_a_transform(wrap):
    def g(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 0] += x[:, 2].abs()
        y[:, 0] += x[:, 2].abs()
        return y.sum()

    return wrap(torch.func.grad(g))(draw(2, 3))


@issue(91469)
def two_gradients_inside(wrap):
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        (first,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.sum(), x)[0]

    return wrap(f)(draw(3).requires_grad_())


@issue(183603)
def a_gradient_of_a_gradient_inside(wrap):
    def f(x: Tensor) -> Tensor:
        return torch.autograd.grad((x**4).sum(), x, create_graph=True)[0]

    return gradients(wrap(f), (4,))


@issue(181581)
def a_gradient_with_a_history(wrap):
    x = draw(3).requires_grad_()
    (first,) = torch.autograd.grad(wrap(lambda x: (x**3).sum())(x), x, create_graph=True)
    return first, torch.tensor(first.requires_grad), *torch.autograd.grad(first.sum(), x)


@issue(172386)
def a_pullback(wrap):
    return wrap(torch.func.vjp(torch.sin, draw(2))[1])(draw(2, seed=1))


@issue("pullbacks of calls outside")
def pullbacks_of_calls_outside(wrap):
    x, t, u = draw(2), draw(2, seed=1), draw(2, seed=2)
    first = torch.func.vjp(torch.sin, x)[1]
    second = torch.func.vjp(lambda a, b: (a * b, a.sin()), x, u)[1]

    def composed(t):
        return first(torch.func.vjp(torch.cos, t)[1](t)[0])[0]

    return (
        wrap(lambda t: first(t)[0] * 2)(t),
        *wrap(lambda t, u: second((t, u)))(t, u),
        wrap(composed)(t),
        wrap(torch.func.vmap(first))(torch.stack([t, u])),
        torch.func.grad(lambda t: wrap(lambda t: first(t)[0])(t).sin().sum())(t),
    )


@issue("a pullback of a tensor with a history")
def a_pullback_of_a_tensor_with_a_history(wrap):
    x, t = draw(2).requires_grad_(), draw(2, seed=1)
    pullback = torch.func.vjp(torch.sin, x)[1]
    found = wrap(lambda t: pullback(t)[0])(t)
    return found, *torch.autograd.grad(found.sum(), x)


@issue("a pullback that leaves the graph")
def a_pullback_that_leaves_the_graph(wrap):
    def broken(x, t):
        y, pullback = torch.func.vjp(torch.sin, x)
        torch._dynamo.graph_break()
        return y, pullback(t)

    returned = wrap(lambda x: torch.func.vjp(torch.sin, x)[1])
    return wrap(broken)(draw(2), draw(2, seed=1)), returned(draw(2))(draw(2, seed=1))


@issue(197887)
def a_write_to_a_matrix_whose_transpose_is_saved(wrap):
    x, w = draw(3, 3).requires_grad_(), draw(3, 3).requires_grad_()
    left = x * 1
    y = wrap(lambda x, w: x @ w)(left, w)
    left.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), w)
    return y


def test_a_whole_graph_has_no_zeros_for_a_pullback_of_a_call_outside():
    torch.compiler.reset()
    pullback, t = torch.func.vjp(torch.sin, draw(2))[1], draw(2, seed=1)
    try:
        found = mg.compile(lambda t: pullback(t)[0], lowering="eager", fullgraph=True)(t)
    except Exception as error:
        assert "pullback" in str(error) or "Dynamo" in str(error)
    else:
        torch.testing.assert_close(found, pullback(t)[0])


def compare(number, lowering):
    torch.compiler.reset()
    with warnings.catch_warnings(), mg.override():
        warnings.simplefilter("ignore")
        expected = ISSUES[number](lambda f: f)
        found = ISSUES[number](lambda f: mg.compile(f, lowering=lowering))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("number", ISSUES)
def test_graphs_have_the_derivatives_of_the_program(number):
    compare(number, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("number", ISSUES)
def test_inductor_has_the_derivatives_of_the_program(number):
    compare(number, "inductor")
