"""Dual levels in a process: threads, memory, compiled functions, modes, and nested tensors."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import dual_level, make_dual, unpack_dual


def tangent(x, level=None):
    return unpack_dual(x, level=level).tangent


# -- threads


def test_levels_belong_to_their_thread():
    """Threads at different depths at once, each with its own direction."""
    barrier = threading.Barrier(4)

    def work(i):
        x = torch.full((3,), float(i + 1))
        barrier.wait()
        for _ in range(20):
            with dual_level() as a:
                y = make_dual(x, x)
                assert torch.equal(tangent(y * y), 2 * x * x)
                if i % 2:
                    with dual_level() as b:
                        z = make_dual(y, x)
                        assert torch.equal(tangent(tangent(z * z, b), a), 2 * x * x)
            with pytest.raises(RuntimeError, match="no dual level"):
                unpack_dual(x)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_concurrent_reads():
    """Many threads read the tangents of one tensor, and of views of it which are made on the way."""
    x, t = torch.randn(2, 16, 16)
    with dual_level() as level:
        dual = make_dual(x, t)
        barrier = threading.Barrier(8)

        def read(i):
            barrier.wait()
            for k in range(50):
                row = (i + k) % 16
                assert torch.equal(tangent(dual[row], level), t[row])
                with level.on_this_thread():
                    assert torch.equal(tangent(dual.t()[row] * 2), 2 * t[:, row])
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))
        with pytest.raises(RuntimeError, match="sees levels already"), level.on_this_thread():
            pass
    with pytest.raises(RuntimeError, match="not open"), level.on_this_thread():
        pass


def test_the_backward_pass_of_another_thread():
    """Autograd runs a deep backward in a backward on a thread of its own: levels go with the call."""

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, n):
            ctx.n = n
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                leaf = torch.ones(2, requires_grad=True)
                y = Deep.apply(leaf, ctx.n - 1) if ctx.n else leaf.sin()
                y.sum().backward()
            seen.append((threading.get_ident(), tangent(dual.cos())))
            return grad, None

    seen = []
    with dual_level():
        dual = make_dual(torch.zeros(2), torch.ones(2))
        Deep.apply(torch.ones(2, requires_grad=True), 70).sum().backward()
    assert len({thread for thread, _ in seen}) > 1 and all(t is not None for _, t in seen)


# -- memory


def test_leaving_a_level_frees_its_tangents():
    kept = []
    with dual_level() as outer:
        x = make_dual(torch.ones(1000), torch.ones(1000))
        with dual_level():
            y = make_dual(x, torch.ones(1000)).sin()
            inner = weakref.ref(tangent(y).untyped_storage())
            kept.append((x, y))
            assert inner() is not None
        gc.collect()
        assert inner() is None and tangent(y, outer) is not None
        last = weakref.ref(tangent(y, outer).untyped_storage())
    gc.collect()
    assert last() is None and not len(outer.shadows)


def test_a_tangent_goes_with_its_tensor():
    """Inside of an open level nothing is kept of what is gone, views keep what they need, and ids are not mixed up."""
    with dual_level() as level:
        x = make_dual(torch.ones(100), torch.ones(100))
        for _ in range(50):
            x.sin().mul_(2).exp()
        assert len(level.shadows) == 1
        view = x[3:5]
        del x
        assert torch.equal(tangent(view), torch.ones(2))
        del view
        assert not len(level.shadows)
        assert all(tangent(torch.empty(100)) is None for _ in range(50))


def test_an_unpacked_tangent_is_an_ordinary_tensor():
    with dual_level():
        x = make_dual(torch.ones(3), torch.ones(3))
        t = tangent(x * x)
    assert torch.equal(t + 1, torch.full((3,), 3.0)) and torch.equal(x, torch.ones(3))
    with dual_level():
        assert tangent(x) is None


def test_an_error_inside_leaves_no_level_open():
    with pytest.raises(ZeroDivisionError), dual_level(), dual_level():
        make_dual(torch.ones(2), torch.ones(2)).sin()
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="no dual level"):
        unpack_dual(torch.ones(2))


# -- modes, scripts, compiled functions


def test_modes_and_subclasses_work_inside():
    with dual_level():
        x = make_dual(torch.ones(4, 4), torch.ones(4, 4))
        with FlopCounterMode(display=False) as counter:
            x @ x
        assert counter.get_total_flops() == 3 * 2 * 4**3  # the product, and two for the tangent
        torch.nested.nested_tensor_from_jagged(torch.ones(4, 2), torch.tensor([0, 1, 4])).sin()
        assert torch.func.grad(lambda y: y.sin().sum())(torch.zeros(2)).eq(1).all()


def test_scripted_and_compiled_functions():
    function = lambda y: y.sin() * y  # noqa: E731
    scripted = torch.jit.trace(function, torch.ones(2))
    compiled = torch.compile(function, backend="aot_eager")
    compiled(torch.ones(2))  # before: the graph exists
    x = torch.rand(2)
    with dual_level():
        d = make_dual(x, torch.ones(2))
        for f in (scripted, compiled):
            assert torch.allclose(tangent(f(d)), x.cos() * x + x.sin())


def test_other_threads_run_compiled_functions_while_a_level_is_open():
    graphs = []
    compiled = torch.compile(lambda x: x.cosh(), backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)

    def on_the_level(level):
        with level.on_this_thread():
            compiled(torch.ones(2))

    with ThreadPoolExecutor(1) as other, dual_level():
        with dual_level() as level:
            other.submit(on_the_level, level).result()
        compiled(torch.ones(2))
        assert not graphs
        other.submit(compiled, torch.ones(2)).result()
        assert len(graphs) == 1


def test_compiled_functions_run_eagerly_on_the_threads_of_a_backward_pass():
    """Autograd runs a deeply nested backward pass on another thread, which sees the level."""
    graphs, threads = [], []
    compiled = torch.compile(lambda x: x.cosh(), backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)

    def nested(depth):
        def hook(_):
            if depth:
                nested(depth - 1)
            else:
                threads.append(threading.get_ident())
                compiled(torch.ones(2))

        with torch.enable_grad():
            y = torch.ones(2, requires_grad=True) * 2
            y.register_hook(hook)
            y.sum().backward()

    with dual_level():
        nested(70)
    assert threads != [threading.get_ident()] and not graphs


# -- strided nested tensors


def ragged(*tensors):
    return torch.nested.nested_tensor(list(tensors))


NESTED = {
    "sin": lambda n: n.sin(),
    "relu": lambda n: torch.relu(n),
    "product": lambda n: n * n + 2 * n - 1,
    "softmax": lambda n: torch.softmax(n, -1),
    "linear": lambda n: torch.nn.functional.linear(n, torch.arange(6.0).view(2, 3).sin()),
    "layer_norm": lambda n: torch.nn.functional.layer_norm(n, (3,), *torch.arange(6.0).view(2, 3).cos()),
    "sum": lambda n: torch.sum(n, -1, keepdim=True),
    "mg.nested": lambda n: mg.nested.softmax(mg.nested.gelu(n), 1),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NESTED)
def test_strided_nested_tensors(name):
    function, numbers = NESTED[name], [torch.arange(1.0, 7).view(2, 3), torch.arange(1.0, 13).view(4, 3)]
    components, directions = [2 * x.sin() for x in numbers], [(3 * x).cos() for x in numbers]
    with dual_level() as a, dual_level() as b:
        n = make_dual(make_dual(ragged(*components), ragged(*directions), level=a), ragged(*directions), level=b)
        y = function(n)
        first, second = tangent(y, b), tangent(tangent(y, b), a)
        assert y.is_nested and first.is_nested and first.layout is torch.strided
        found = [unpack_dual(y, level=b).primal, first, *([] if second is None else [second])]
        found = [[unpack_dual(c, level=a).primal for c in unpack_dual(part, level=a).primal.unbind()] for part in found]
    step, at = 1e-3, lambda s: [c.double() + s * d for c, d in zip(components, directions)]  # noqa: E731
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        lower, middle, upper = (list(function(ragged(*at(s))).unbind()) for s in (-step, 0.0, step))
    finally:
        torch.set_default_dtype(before)
    for i, (a, m, b) in enumerate(zip(lower, middle, upper)):
        assert torch.allclose(found[0][i].double(), m, atol=1e-5)
        assert torch.allclose(found[1][i].double(), (b - a) / (2 * step), atol=1e-3)
        curvature = (b - 2 * m + a) / step**2
        assert torch.allclose(found[2][i].double() if len(found) > 2 else torch.zeros_like(m), curvature, atol=1e-2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_refusals():
    n = ragged(torch.randn(2, 3), torch.randn(4, 3))
    with dual_level():
        with pytest.raises(ValueError, match="tangent has sizes"):
            make_dual(n, ragged(torch.randn(2, 3), torch.randn(5, 3)))
        with pytest.raises(TypeError, match="is_nested"):
            make_dual(n, torch.randn(2, 3))
        d = make_dual(n, n)
        assert tangent(d.detach()) is None
        for call in (lambda: d.mul_(2), lambda: torch.nn.functional.embedding_bag(torch.tensor([[0]]), d)):
            with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
                call()
