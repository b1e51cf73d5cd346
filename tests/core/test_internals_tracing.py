"""What core/internals relies on of compilers and tracers, and where values can be read, still does what is said there."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.interpreters import run_python
from helpers.ops import inside_kernel
from helpers.tensors import random, same
from torch.func import grad, vmap

from torch_manualgrad.core import internals
from torch_manualgrad.core.engine import node

# -- compilers and tracers --------------------------------------------------------------------------------------------


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


def test_other_threads_compile_while_one_is_outside_of_the_compiler():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    f = torch.compile(lambda x: x.sin(), backend=backend, fullgraph=True)
    stance = sys.modules["torch._dynamo.eval_frame"]._stance
    with ThreadPoolExecutor(1) as other, internals.outside_of_compiler():
        f(torch.ones(3))
        assert not graphs
        other.submit(f, torch.ones(3)).result()
        assert len(graphs) == 1
        with internals.outside_of_compiler():
            f(torch.ones(4))
        assert len(graphs) == 1
    f(torch.ones(3, 4))
    assert len(graphs) == 2 and sys.modules["torch._dynamo.eval_frame"]._stance is stance


def test_a_dual_level_is_there_or_made():
    def tangent():
        with internals.some_dual_level():
            x = internals.dual(torch.ones(2), torch.ones(2))
            return internals.tangent(x.sin())

    with torch.autograd.forward_ad.dual_level():
        inside = tangent()
    assert torch.equal(tangent(), inside) and torch.equal(inside, torch.ones(2).cos())


def test_trace_autograd_functions():
    class Double(torch.autograd.Function):
        forward = staticmethod(lambda x: 2 * x)
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: 2 * g)
        jvp = staticmethod(lambda ctx, t: 2 * t)

    from torch_manualgrad.compiling import backend  # it installs the hook for itself

    def f(x):
        return Double.apply(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Double.apply has derivatives of its own"):
        with pytest.warns(RuntimeWarning, match="Double.apply has derivatives of its own"):
            torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2))
    assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


# -- values: known zeros, modes, tensors without data -----------------------------------------------------------------


def test_known_zeros():
    assert internals.is_known_zero(torch._efficientzerotensor(2)) and not internals.is_known_zero(torch.zeros(2))


def test_a_mode_sees_calls_below_autograd_and_their_memory():
    class Seen(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append((func, [internals.memory_of(a) for a in args if isinstance(a, torch.Tensor)]))
            return func(*args, **kwargs or {})

    names = []
    x = random(2, 3)
    with Seen(), internals.below_autograd():
        x.T.matmul(x)  # a composite operator comes as it is called
    assert (torch.ops.aten.matmul.default, [internals.memory_of(x)] * 2) in names
    assert internals.memory_of(x.clone()) != internals.memory_of(x)
    assert internals.memory_of(x.to_sparse()) is None


def test_a_mode_imports_no_dynamo_and_is_not_compiled(tmp_path):
    code = """
import sys, torch
from torch_manualgrad.core import internals

class Seen(internals.DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})

with Seen(), internals.calls_seen(print):
    torch.ones(2).sin()
assert "torch._dynamo" not in sys.modules
graphs = []
dispatch = torch.compile(Seen().__torch_dispatch__, backend=lambda graph, _: graphs.append(graph) or graph.forward)
assert dispatch(torch.sin, (), (torch.zeros(2),)).eq(0).all() and not graphs
"""
    ran = run_python("-c", code, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_modes_see_a_call_at_the_next_level():
    """In the middle of a call of torch.func they see nothing, but there."""

    class Seen(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    def probe(op, keyset, x):
        def inside(x):
            with Seen():
                return x.sin()

        assert inside(x) is not None and not seen
        return internals.at_next_level(inside, internals.primal(x))

    seen = []
    x = random(3)
    same(grad(lambda x: inside_kernel(probe, x).detach().sum() + (x * x).sum())(x), 2 * x)
    assert seen == [torch.ops.aten.sin.default]


def test_values_are_read_where_they_can_be():
    x = random(3)
    assert internals.values_readable([x]) and not internals.values_readable([x.to("meta")])
    with internals.FakeTensorMode() as mode:
        assert not internals.values_readable([x])
        fake = mode.from_tensor(x)
    assert not internals.values_readable([fake])
    assert internals.are_finite([x, x.to(torch.complex64), x.half()])
    for bad in (float("inf"), float("nan")):
        assert not internals.are_finite([x, torch.tensor([1.0, bad])])

    def of_batch(y):
        assert internals.value_of(y) is x2
        assert internals.values_readable([y]) and not internals.are_finite([y])
        return y

    x2 = torch.tensor([[1.0], [float("nan")]])
    vmap(of_batch)(x2)
    assert internals.decompositions[torch.ops.aten.gelu_backward.default] is not None


def test_calls_are_seen_without_surrounding_modes():
    seen = []

    def see(op, args, kwargs, result):
        seen.append((op.name(), type(result).__name__))

    def inside(x):
        with internals.fakes() as fake:
            y = fake((2, 3), torch.float64, torch.device("cpu"))
            assert y.shape == (2, 3) and not y.requires_grad
            with internals.calls_seen(see):
                torch.nn.functional.linear(y, y)
            with pytest.raises(internals.ReadsValues):
                y.sum().item()
        with internals.fakes(real=True):
            assert torch.ones(2).sum().item() == 2
        return x * 2

    vmap(grad(lambda x: inside(x)))(random(3))
    assert [n for n, _ in seen if n.startswith("aten")][:2] == ["aten::t", "aten::mm"] and "FakeTensor" in {
        kind for _, kind in seen
    }


def test_a_tensor_without_memory():
    class Kind(torch.Tensor):
        @staticmethod
        def __new__(cls, like):
            return internals.tensor_without_memory(cls, like)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise TypeError(func.name())

    x = Kind(random(2, 3))
    assert x.shape == (2, 3) and x.dtype is random(1).dtype
    with pytest.raises(TypeError, match="aten::sin"):
        x.sin()


def test_a_function_of_constants_in_a_graph():
    called = []

    @internals.constant_in_graphs
    def length(shape):
        called.append(shape)  # which Dynamo would not trace
        return len(shape)

    f = torch.compile(lambda x: x * length(tuple(x.shape)), backend="eager", fullgraph=True, dynamic=False)
    x = random(2, 3)
    same(f(x), x * 2)
    same(f(x), x * 2)
    assert called == [(2, 3)]


def test_the_value_of_a_constant():
    x = random(2)
    assert internals.value_of_constant(x) is x
    with internals.FakeTensorMode() as mode:
        number, none = internals.value_of_constant(torch.tensor(2.5)), internals.value_of_constant(mode.from_tensor(x))
        several = internals.value_of_constant(torch.tensor([2.5]))
    assert isinstance(number, float) and number == 2.5 and none is None and several.tolist() == [2.5]
