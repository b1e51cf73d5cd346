"""The private names of torch that operators with Python kernels rely on."""

import torch
from helpers.ops import inside_kernel
from helpers.tensors import close, random
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import torch_manualgrad as mg
from torch_manualgrad.core import internals

X = random(3)


def test_decomposes_by():
    """A tracer sees what the function calls, and nobody else calls it."""
    with torch.library._scoped_library("manualgrad_test_decomposes", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x.cos(), "CompositeExplicitAutograd")
        op = torch.ops.manualgrad_test_decomposes.f.default
        internals.decomposes_by(op, lambda x: x.sin())
        close(op(X), X.cos())
        assert "aten.sin" in make_fx(lambda x: op(x))(X).code


def test_modes_are_active():
    seen = []
    assert not internals.modes_are_active()
    make_fx(lambda x: (seen.append(internals.modes_are_active()), x.sin())[1])(X)
    assert seen == [True]


def test_above_the_call():
    """Inside of a kernel autograd and transforms work again."""

    def kernel(x):
        with internals.above_the_call():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad((y**2).sum(), y)
            return g + grad(lambda y: (y**2).sum())(x.detach())

    close(inside_kernel(lambda op, keyset, x: kernel(x), X), 4 * X)
    with internals.below_autograd():
        close(kernel(X), 4 * X)


def test_is_tracked_here():
    x = X.clone().requires_grad_()
    assert internals.is_tracked_here(x) and not internals.is_tracked_here(X)
    found = []

    def inner(y):
        found.extend(
            [internals.is_tracked_here(y), internals.is_tracked_here(x), internals.is_tracked_here(y.detach())]
        )
        return y.sum()

    grad(inner)(X)
    vjp(lambda x: grad(lambda y: (found.append(internals.is_tracked_here(x)), inner(y))[1])(x), X)
    assert found == [True, False, False, False, True, False, False]


def test_layers():
    found = []
    vmap(lambda x: jvp(lambda x: (found.append(internals.layers(x)), x.sin())[1], (x,), (x,)))(X)
    (layers,) = found
    assert len(layers) == 3 and torch.equal(layers[-1], X) and internals.layers(X)[0] is X


def test_own_levels_are_open():
    assert not internals.own_levels_are_open()
    with mg.forward_ad.dual_level():
        assert internals.own_levels_are_open()


def test_needs_reverse():
    found = []
    see = lambda *xs: [found.append(internals.needs_reverse(x)) for x in xs]  # noqa: E731
    see(X, X.clone().requires_grad_())
    jvp(lambda x: (see(x), x.sin())[1], (X,), (X,))
    grad(lambda x: jvp(lambda y: (see(x, y, X), y * x)[1], (X,), (x,))[1].sum())(X)
    grad(lambda x: vmap(lambda y: (see(y), y)[1])(x).sum())(X)
    assert found == [False, True, False, True, True, False, True]


def test_is_escaped():
    found = []

    def inside(x):
        found.append(internals.is_escaped(x))
        with internals.in_clean_state():
            found.append(internals.is_escaped(x))
        return x.sum()

    grad(inside)(X)
    assert found == [False, True] and not internals.is_escaped(X)


def test_function_arguments_replaced():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    before = torch.autograd.Function.__dict__["apply"]
    with internals.function_arguments_replaced(lambda x: x + 1), internals.function_arguments_replaced(lambda x: x * 3):
        close(Twice.apply(X), (3 * X + 1) * 2)
    close(Twice.apply(X), X * 2)
    assert torch.autograd.Function.__dict__["apply"] is before
