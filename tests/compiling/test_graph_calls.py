"""Calls of compiled functions that the compiled library makes: the same gradients and errors as Python's, and no leaks."""

import ctypes
import gc
import itertools
import sys
import threading
import weakref

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.compiling import calls
from torch_manualgrad.core.internals import FakeTensorMode, traced
from torch_manualgrad.core.rule import reached

pytestmark = pytest.mark.skipif(calls.served is None, reason="there is no library of calls for this torch")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def compiled(function, lowering="eager"):
    return mg.compile(function, lowering=lowering, fullgraph=True, dynamic=False)


def points(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def f(x, w):
    return torch.tanh(x @ w).square().sum(0)


def steps(function, x, w):
    """A value, its gradients, and theirs."""
    y = function(x, w)
    first = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first) + y.sum(), [x, w], create_graph=True)
    return [y, *first, *second, *torch.autograd.grad(second[0].sin().sum(), [x, w])]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def served():
    """How many calls on this thread the library made, and how many backwards Python computed."""
    found = (ctypes.c_int64 * 3)()
    calls.calls_library.manualgrad_calls_counts(found)
    return found[0], found[2]


def test_python_serves_none_of_the_backwards_of_a_training_step():
    g = compiled(f)
    for _ in range(3):  # until each call keeps what the third derivative reads
        steps(g, points(4, 3), points(3, 5))
    x, w = points(4, 3), points(3, 5)
    made, left = served()
    found = steps(g, x, w)
    assert served() == (made + 4, left)  # the function, its backward, and the backwards of both
    same(found, steps(f, x, w))


@pytest.mark.skipif(not reached("2.13"), reason="kernels are called from Python with older versions")
def test_inductors_code_runs_without_python(monkeypatch):
    """On several threads, with arguments of other strides, and with results that are an argument or each other."""
    g = compiled(lambda x, w: (f(x, w), x, x.sin(), x.sin()), lowering="inductor")
    plain = lambda x, w: (f(x, w), x, x.sin(), x.sin())  # noqa: E731

    def total(function):
        return lambda x, w: torch.cat([y.reshape(-1) for y in function(x, w)])

    x, w = torch.randn(3, 4, dtype=torch.float64).t(), torch.randn(6, 5, dtype=torch.float64)[::2]
    for _ in range(3):
        steps(total(g), points(4, 3), points(3, 5))
        steps(total(g), x.detach().requires_grad_(), w.detach().requires_grad_())
    ran = [n for n, graph in calls.functions.items() if n in calls.run and graph.options.lowering == "inductor"]
    assert len(ran) >= 4

    def refuse(values):
        raise AssertionError("Python runs a graph")

    monkeypatch.setattr(calls, "run", dict.fromkeys(ran, refuse))
    expected, failures = steps(total(plain), x.requires_grad_(), w.requires_grad_()), []

    def work():
        try:
            for _ in range(20):
                same(steps(total(g), x.detach().requires_grad_(), w.detach().requires_grad_()), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_inductors_code_frees_what_it_is_given():
    g = compiled(f, lowering="inductor")
    for _ in range(3):
        g(points(4, 3), points(3, 5))
    x, w = points(4, 3), points(3, 5)
    y = g(x, w)
    freed = [weakref.ref(t.untyped_storage()) for t in (x.detach(), w.detach(), y.detach())]
    alive = [weakref.ref(t) for t in (x, w, y)]
    uses = [t._use_count() for t in (x, w)]
    del y
    gc.collect()
    assert [t._use_count() for t in (x, w)] < uses
    del x, w
    gc.collect()
    assert not any(r() for r in [*alive, *freed])


def allocated(step):
    """The bytes that a step allocates, and the largest number of these that are not freed yet."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sum(n for n in sizes if n > 0), max(itertools.accumulate(sizes))


class Attention(torch.nn.Module):
    """Whose saved queries, keys and values are views of one tensor."""

    def __init__(self):
        super().__init__()
        self.packed = torch.nn.Linear(64, 192)

    def forward(self, x):
        heads = self.packed(x).reshape(4, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(*heads)


MODELS = {
    "layers": lambda: torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]),
    "attention": Attention,
}


@pytest.mark.skipif(not reached("2.13"), reason="Python holds the residuals with older versions")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_needs_no_more_memory_than_with_inductor(name):
    """The backward copies no residual, and frees each after its last use, while the gradients of the parameters grow."""
    model, x, found = MODELS[name](), torch.randn(64, 64), {}
    for name, call in {"ours": compiled(model, "inductor"), "inductor": torch.compile(model, dynamic=False)}.items():

        def step(call=call):
            model.zero_grad()
            call(x).square().mean().backward()

        step()
        step()
        model.zero_grad()
        found[name] = allocated(step)
    for ours, inductors in zip(found["ours"], found["inductor"]):
        assert ours <= 1.02 * inductors


def test_a_graph_that_runs_before_another_has_its_arguments():
    """As in a signal handler, which Python calls at the first line of a function."""
    inner, outer, x = compiled(torch.sin), compiled(torch.exp), torch.ones(3)
    inner(x)
    outer(x)
    found = []

    def tracer(frame, event, argument):
        if frame.f_code is calls._run.__code__ and not found:
            found.append(None)
            found[0] = inner(2 * x)

    sys.settrace(tracer)
    try:
        y = outer(x)
    finally:
        sys.settrace(None)
    torch.testing.assert_close((found[0], y), (torch.sin(2 * x), torch.exp(x)))


def test_values_at_other_strides():
    """Compiled code reads memory at the strides that it was compiled for."""

    def g(x, w):
        return x.tanh() * w

    h = compiled(g, lowering="inductor")
    for k in range(3):
        x, w = points(4, 6), points(4, 6)
        if k:
            x = torch.randn(6, 4, dtype=torch.float64).t().requires_grad_()
            w = torch.randn(8, 6, dtype=torch.float64)[::2].requires_grad_()
        same(steps(h, x, w), steps(g, x, w))


def test_gradients_that_are_the_cotangent_itself():
    """They are tensors of their own: the cotangent keeps its history, and each gradient has one."""
    g = compiled(lambda x, w: x + w)
    x, w, v = points(4), points(4), points(4)
    for _ in range(2):
        a, b = torch.autograd.grad(g(x, w), [x, w], v, create_graph=True)
        assert v.is_leaf and a is not b and a is not v
        (of_v,) = torch.autograd.grad((2 * a + a * b).sum(), v)
        torch.testing.assert_close(of_v, 2 + 2 * v)


def test_a_graph_that_has_been_freed_raises():
    y = compiled(f)(points(4, 3), points(3, 5))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_node_outlives_its_function():
    x, w = points(4, 3), points(3, 5)
    y = compiled(f)(x, w)
    torch.compiler.reset()
    gc.collect()
    first = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])
    expected = torch.autograd.grad(f(x, w).sin().sum(), [x, w], create_graph=True)
    same([*first, *second], [*expected, *torch.autograd.grad(sum(g.square().sum() for g in expected), [x, w])])


def test_nothing_is_left_of_functions_that_are_gone():
    def one():
        torch.compiler.reset()
        steps(compiled(f), points(4, 3), points(3, 5))
        torch.compiler.reset()
        gc.collect()
        return len(calls.functions), len(calls.run)

    assert one() == one()


def test_saved_tensor_hooks_are_given_what_a_call_saves():
    g = compiled(f)
    x, w = points(4, 3), points(3, 5)
    expected = torch.autograd.grad(f(x, w).sum(), [x, w])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or (t.clone(),), lambda t: t[0]):
        y = g(x, w)
    assert packed
    same(torch.autograd.grad(y.sum(), [x, w]), expected)


def test_gradients_in_batches():
    g = compiled(f)
    x, w = points(4, 3), points(3, 5)
    cotangents = torch.randn(6, 5, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(h(x, w), [x, w], cotangents, is_grads_batched=True, retain_graph=True) for h in (g, f)
    )
    same(found, expected)


def test_a_backward_under_autocast():
    g = compiled(f)
    x, w = points(4, 3, dtype=torch.float32), points(3, 5, dtype=torch.float32)
    expected = torch.autograd.grad(f(x, w).sum(), [x, w])
    y = g(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(y.sum(), [x, w])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_a_tangent_that_arrives_in_a_backward():
    g = compiled(f)
    x, w, v = points(4, 3), points(3, 5), torch.randn(5, dtype=torch.float64)
    found = []
    for h in (g, f):
        with torch.autograd.forward_ad.dual_level():
            cotangent = torch.autograd.forward_ad.make_dual(torch.ones(5, dtype=torch.float64), v)
            gradients = torch.autograd.grad(h(x, w), [x, w], cotangent)
            found.append([torch.autograd.forward_ad.unpack_dual(t).tangent for t in gradients])
    same(*found)


def test_rules_of_the_thread_that_made_the_call():
    wrong = mg.elementwise("aten::tanh", lambda self: 3 + 0 * self, register=False)
    g = compiled(lambda x: torch.tanh(x))
    x = points(4)
    with mg.override(wrong, scope="thread"):
        y = g(x)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.testing.assert_close(first, torch.full_like(x, 3))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], first)
    torch.testing.assert_close(torch.autograd.grad(g(x).sum(), x)[0], 1 - x.tanh().square())


def test_backwards_of_many_threads_at_once():
    g = compiled(f)
    x, w = points(4, 3), points(3, 5)
    expected, failures = steps(f, x, w), []
    steps(g, x, w)

    def work():
        try:
            for _ in range(20):
                a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
                same(steps(g, a, b), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):  # threads of torch 2.10 leave each other's settings
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("scale", [None, 2.0], ids=["leaf", "with a history"])
def test_compiled_autograd_over_a_compiled_function(scale):
    g = compiled(f)
    for _ in range(2):
        x, w = points(4, 3), points(3, 5)
        given = x if scale is None else x * scale
        expected = torch.autograd.grad(f(given, w).sin().sum(), [x, w], retain_graph=True)
        y = g(given, w)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.sin().sum().backward()
        same([x.grad, w.grad], expected)


def test_a_node_that_saves_nothing_runs_again_in_python_too():
    x = points(3)
    y = compiled(lambda x: x + 3)(x)
    y.backward(torch.ones_like(y))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(torch.autograd.grad(y, x, torch.ones_like(y)), [torch.ones_like(x)])


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_writes_to_results_with_open_sizes(lowering):
    f = mg.compile(lambda x, b: torch.cat([x, b.sin()]), lowering=lowering, fullgraph=True, dynamic=True)
    for n in (4, 5):
        cotangent, x = torch.ones(2 * n, dtype=torch.float64), points(n)
        kept = (cotangent * points(2 * n)).sum()
        torch.autograd.grad(f(x, points(n)), x, cotangent)[0].mul_(7)  # a view of the cotangent
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def test_threads_that_ask_for_one_derivative_at_once():
    failures = []
    for _ in range(10):
        torch.compiler.reset()
        g, start = compiled(lambda x: x.sin() * x), threading.Barrier(4)
        g(points(3))  # the graph is there, and no derivative

        def work(g=g, start=start):
            try:
                x = points(3)
                start.wait()
                (found,) = torch.autograd.grad(g(x).sum(), x)
                same([found], [x.sin() + x * x.cos()])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        with torch._dynamo.config.patch(automatic_dynamic_shapes=True):  # as above
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not failures


def test_calls_while_another_thread_traces():
    g, found, mode = compiled(lambda x: x.sin()), [], FakeTensorMode()
    x = points(3)
    g(x)

    def function(y):
        thread = threading.Thread(target=lambda: found.append(g(x)))
        thread.start()
        thread.join()
        return [y.cos()]

    traced(function, [mode.from_tensor(torch.ones(3))], mode, decompose={})
    same(found, [x.sin()])


def test_a_hook_that_gives_saved_tensors_another_dtype():
    g = compiled(lambda x: x.sin(), lowering="inductor")
    x = points(3, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t):
        y = g(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.half().float().cos())


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_writes_to_results_that_share_memory_count_for_both(lowering):
    one, w = torch.ones(4, dtype=torch.float64), points(4)
    g = compiled(lambda x, b: torch.cat([x, b.sin()]), lowering)
    cotangent = torch.ones(8, dtype=torch.float64)
    kept = (cotangent * points(8)).sum()
    gradient = torch.autograd.grad(g(points(4), points(4)), w, cotangent, allow_unused=True)
    assert gradient == (None,)
    x = points(4)
    torch.autograd.grad(g(x, w), x, cotangent)[0].mul_(7)  # a view of the cotangent
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    kept = (one * w).sum()
    compiled(lambda x: x.chunk(2), lowering)(one)[0].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    y, q, _ = compiled(lambda x: (y := x.sin(), *y.split(2)), lowering)(w)
    kept = (y * y).sum()
    with torch.no_grad():
        q.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    q, _ = compiled(lambda x: x.chunk(2), lowering)(w * 1)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        q.mul_(3)


def test_an_inference_tensor_that_no_derivative_needs():
    with torch.inference_mode():
        b = torch.ones(3, dtype=torch.float64)
    x = points(3)
    same(torch.autograd.grad(compiled(lambda x, b: x + b)(x, b).sum(), x), [torch.ones_like(x)])


def test_a_variable_that_a_call_is_added_to_is_freed():
    g, alive = compiled(lambda x: x + 3), []
    for _ in range(3):
        x = points(2) * 2
        x.add_(g(x))
        alive.append(weakref.ref(x))
        del x
    gc.collect()
    assert [x() for x in alive] == [None] * 3
