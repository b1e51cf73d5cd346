"""What core/internals relies on of PyTorch's compilers and tracers still does what is said there."""

import pytest
import torch
from helpers.tensors import random, same

from torch_manualgrad.core import internals
from torch_manualgrad.core.engine import node


def test_guard_on_compiled_graphs():
    """Dynamo still takes the ambient guard: without it every change would drop all graphs."""
    import torch._dynamo  # noqa: F401

    from torch_manualgrad.core import compile_cache

    assert internals.guard_compiled_graphs(compile_cache.state) is True


def test_skipped_by_dynamo():
    def compiled(f):
        graphs = []
        torch.compile(f, backend=lambda graph, _: graphs.append(graph) or graph.forward)(random(2))
        return graphs

    assert compiled(lambda x: x.sin()) and not compiled(internals.skipped_by_dynamo(lambda x: x.sin()))


def test_breaks_graphs():
    called = []

    @internals.breaks_graphs("it appends to a list")
    def f(x):
        called.append(torch.compiler.is_compiling())
        return x.sin()

    x, graphs = random(2), []
    compiled = torch.compile(lambda x: f(x * 2) + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    same(compiled(x), (x * 2).sin() + 1)
    assert called == [False] and len(graphs) == 2  # before the call and after it
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it appends to a list"):
        torch.compile(lambda x: f(x) + 1, backend="eager", fullgraph=True)(x)


def test_compiled_backward():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return (2 if torch.compiler.is_compiling() else 0) * g * ctx.saved_tensors[0]

    x = random(3).requires_grad_()
    y = Square.apply(x).sum()
    with internals.compiled_backward():
        y.backward()
    same(x.grad, 2 * x.detach())
    torch.compiler.reset()


def test_no_meta_kernel():
    torch.library.define("internals_for_tests::without_meta", "(Tensor x) -> Tensor")
    torch.library.impl("internals_for_tests::without_meta", "CPU", torch.sin)
    op = torch.ops.internals_for_tests.without_meta
    with pytest.raises(internals.NoMetaKernel), internals.FakeTensorMode() as mode:
        op(mode.from_tensor(random(3)))
    with pytest.raises(internals.NoMetaKernel):
        op(random(3).to("meta"))


def test_which_gradients_a_backward_needs():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, a, b, c):
            return a * b * c

        @staticmethod
        def backward(ctx, g):
            seen.append((internals.followed(ctx), tuple(node.followed(ctx))))
            return None, g, g, g

    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y = Product.apply((), a, b * 2, torch.ones(2)).sum()
    for inputs in (a, b, [a, b]):
        torch.autograd.grad(y, inputs, retain_graph=True)
    y.backward()
    expected = [(True, False, False), (False, True, False), (True, True, False), (True, True, False)]
    assert seen == [(needs, needs) for needs in expected]


def test_a_graph_can_be_traced_in_the_middle_of_anything():
    def traced():
        with internals.in_clean_state():
            x = torch.ones(2, requires_grad=True)
            return torch.autograd.grad((x * x).sum(), x)[0]

    def twice(x):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t)

    with torch.no_grad(), twice(None), torch.autocast("cpu", dtype=torch.bfloat16), internals.below_autograd():
        assert torch.equal(traced(), torch.full((2,), 2.0))
    found = []
    torch.func.grad(lambda x: found.append(traced()) or x.sum())(torch.ones(2))
    assert torch.equal(found[0], torch.full((2,), 2.0))


def test_a_dual_level_is_there_or_made():
    def tangent():
        with internals.some_dual_level():
            x = internals.dual(torch.ones(2), torch.ones(2))
            return internals.tangent(x.sin())

    with torch.autograd.forward_ad.dual_level():
        inside = tangent()
    assert torch.equal(tangent(), inside) and torch.equal(inside, torch.ones(2).cos())


def test_break_at_autograd_functions():
    class Double(torch.autograd.Function):
        forward = staticmethod(lambda x: 2 * x)
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: 2 * g)

    from torch_manualgrad.compiling import backend  # it installs the hook for itself

    def f(x):
        return Double.apply(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Double.apply has derivatives of its own"):
        with pytest.warns(RuntimeWarning, match="Double.apply has derivatives of its own"):
            torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2))
    assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))
