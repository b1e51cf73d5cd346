"""Overrides of one thread and of one module: who follows them, forward and backward."""

import copy
import gc
import pickle
import threading
import time

import pytest
import torch
from helpers.sine import DOUBLE, TRIPLE, factor, sine_times
from helpers.tensors import random, same
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core import activation
from torch_manualgrad.core.override import compiled_calls

pytestmark = pytest.mark.skipif(not activation.in_library, reason="scopes need the library of calls")


def thread(function):
    """What a function returns on another thread."""
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    running = threading.Thread(target=run)
    running.start()
    running.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# A rule whose backward calls sin: which derivative that has shows what the backward follows.
OUTER = mg.rule("aten::asinh", vjp={"self": lambda grad, self: grad * torch.sin(self)}, register=False)


def second(x, y):
    """d/dx of the gradient of y, in units of cos(x): the rule of sin that acted in the backward of y."""
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return round((torch.autograd.grad(first.sum(), x)[0] / x.detach().cos())[0].item(), 6)


def test_other_threads_keep_their_rules():
    with mg.override(DOUBLE, scope="thread"):
        assert factor() == 2 and thread(factor) == 1
        with mg.override(TRIPLE):  # of the process: below what is the thread's own
            assert factor() == 2 and thread(factor) == 3
            assert [a.acting for a in mg.active()] == [DOUBLE]
            assert thread(lambda: [a.acting for a in mg.active()]) == [TRIPLE]
        assert thread(lambda: [factor(), *[mg.active()]]) == [1, []]
    assert factor() == 1 and thread(factor) == 1 and mg.active() == []


def test_threads_have_their_own():
    both = threading.Barrier(2)

    def work(rule):
        found = []
        for _ in range(50):
            with mg.override(rule, scope="thread"):
                both.wait()
                found.append(factor())
                both.wait()
            found.append(factor())
        return found

    results = []
    threads = [threading.Thread(target=lambda r=r: results.append((r, work(r)))) for r in (DOUBLE, TRIPLE)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert dict(results) == {DOUBLE: [2, 1] * 50, TRIPLE: [3, 1] * 50}


def test_an_install_of_one_thread():
    handle = mg.install(DOUBLE, scope="thread")
    assert factor() == 2 and thread(factor) == 1
    handle.remove()
    assert factor() == 1

    def installs():
        mg.install(DOUBLE, scope="thread")
        return factor()

    assert thread(installs) == 2 and factor() == 1  # and ends with the thread
    until = time.monotonic() + 10  # a thread that Python has joined may still be ending
    while activation.truth.entries and time.monotonic() < until:
        with mg.override(DOUBLE):
            pass
    assert not activation.truth.entries


@pytest.mark.parametrize("where", ["here", "there", "after", "after, there"])
def test_a_backward_follows_the_scope_of_its_graph(where):
    x = random(3).requires_grad_()
    block = mg.override(OUTER, DOUBLE, scope="thread")
    with block:
        y = torch.asinh(x)
        if where == "here":
            assert second(x, y) == 2
        if where == "there":
            assert thread(lambda: second(x, y)) == 2
    if where == "after":
        assert second(x, y) == 2
    if where == "after, there":
        assert thread(lambda: second(x, y)) == 2
    assert factor() == 1 and thread(factor) == 1


def test_a_graph_that_was_built_outside_stays_outside():
    x = random(3).requires_grad_()
    with mg.override(OUTER):
        y = torch.asinh(x)
    with mg.override(DOUBLE, scope="thread"):
        assert second(x, y) == 1
    assert thread(lambda: second(x, y)) == 1


def test_nodes_of_pytorch_follow_too():
    """Neither exp nor its backward has a rule here, and an autograd function has Python of its own."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.sin(ctx.saved_tensors[0])

    x = random(3).requires_grad_()
    with mg.override(DOUBLE, scope="thread"):
        y = Sine.apply(x)
    assert second(x, y) == 2 and thread(lambda: second(x, y)) == 2
    assert second(x, Sine.apply(x)) == 1


def test_the_third_order_follows_through_the_graph_of_the_second():
    cube = mg.rule("aten::asinh", vjp={"self": lambda grad, self: grad * torch.acosh(self)}, register=False)
    middle = mg.rule("aten::acosh", vjp={"self": lambda grad, self: grad * torch.sin(self)}, register=False)
    x = (random(3).abs() + 1.5).requires_grad_()
    with mg.override(cube, middle, DOUBLE, scope="thread"):
        y = torch.asinh(x)

    def third():
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return second(x, first)

    assert thread(third) == 2 and third() == 2


def test_checkpointing_recomputes_under_the_scope():
    x = random(3).requires_grad_()
    with mg.override(DOUBLE, scope="thread"):
        y = checkpoint(lambda x: torch.sin(x) * 1, x, use_reentrant=False)
    same(thread(lambda: torch.autograd.grad(y.sum(), x)[0]), 2 * x.detach().cos())


def test_a_block_inside_of_a_backward():
    seen = []

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                seen.append(factor())
                with mg.override(TRIPLE, scope="thread"):
                    seen.append(factor())
                seen.append(factor())
            return grad

    x = random(3).requires_grad_()
    with mg.override(DOUBLE, scope="thread"):
        y = Inside.apply(x)
    torch.autograd.grad(y.sum(), x)
    assert seen == [2, 3, 2] and factor() == 1


def test_nested_tensors():
    """By the gradient of softmax over the components, which is wrong in PyTorch."""
    parts = [torch.randn(n, 4, requires_grad=True) for n in (2, 5)]

    def is_right():
        n = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        found = torch.autograd.grad(torch.softmax(n, 1).values().square().sum(), parts)
        dense = torch.autograd.grad(sum(p.softmax(0).square().sum() for p in parts), parts)
        return all(torch.allclose(a, b) for a, b in zip(found, dense))

    assert not is_right()
    with mg.override("nested"):
        assert is_right()
    with mg.override("nested", scope="thread"):
        assert is_right() and not thread(is_right)
    assert not is_right()


@pytest.mark.parametrize("in_python", [False, True])
def test_the_general_kernel_follows_scopes(in_python):
    x = random(3).requires_grad_()
    with mg.override(OUTER, DOUBLE, scope="thread"):
        y = torch.asinh(x)
    if in_python:
        with compiled_calls.in_python():
            assert thread(lambda: second(x, y)) == 2 and second(x, torch.asinh(x)) != 2
            with mg.override(DOUBLE, scope="thread"):
                assert factor() == 2 and thread(factor) == 1
    hessian = torch.func.hessian(lambda x: torch.cos(x).sum())
    with mg.override(DOUBLE, scope="thread"):
        assert factor(torch.func.vmap(torch.sin)) == 2
        assert thread(lambda: factor(torch.func.vmap(torch.sin))) == 1
        hessian(x.detach())


def test_compiled_functions_know_their_thread():
    compiled = torch.compile(lambda x: torch.sin(x), backend="aot_eager")
    with mg.override(DOUBLE, scope="thread"):
        assert factor(compiled) == 2 and thread(lambda: factor(compiled)) == 1 and factor(compiled) == 2
    assert factor(compiled) == 1


def test_scopes_are_forgotten():
    def kept():
        found = (compiled_calls.ctypes.c_int64 * 5)()
        compiled_calls.calls_library.manualgrad_calls_kept(found)
        return list(found)

    for _ in range(300):
        with mg.override(sine_times(2), scope="thread"):
            pass  # nothing is built: nothing has to be remembered
    assert kept()[2] < 200


def test_the_scope_is_checked():
    for make in (mg.override, mg.install):
        with pytest.raises(ValueError, match="scope must be one of 'process', 'thread', got 'block'"):
            make(DOUBLE, scope="block")


# -- modules ---------------------------------------------------------------------------------------------------------


class Sine(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


def test_one_module():
    ours, other = Sine(), Sine()
    handle = mg.override.module(ours, DOUBLE)
    assert factor(ours) == 2 and factor(other) == 1 and thread(lambda: factor(ours)) == 2
    assert factor(copy.deepcopy(ours)) == 2
    copied = copy.deepcopy(ours)
    assert copied.forward.module is copied
    handle.remove()
    handle.remove()
    assert factor(ours) == 1 and "forward" not in vars(ours)
    with mg.override.module(ours, TRIPLE):
        assert factor(ours) == 3
    assert factor(ours) == 1
    with pytest.raises(TypeError, match=r"override.module takes a torch.nn.Module, got 3"):
        mg.override.module(3)


def test_the_backward_of_one_module():
    class Outer(torch.nn.Module):
        def forward(self, x):
            return torch.asinh(x)

    x, ours, other = random(3).requires_grad_(), Outer(), Outer()
    with mg.override.module(ours, OUTER, DOUBLE), mg.override(OUTER):
        y, z = ours(x), other(x)
    assert second(x, y) == 2 and second(x, z) == 1


def test_a_module_inside_of_another():
    outer, inner = torch.nn.Sequential(), Sine()
    outer.append(inner)
    with mg.override.module(outer, DOUBLE), mg.override.module(inner, TRIPLE):
        assert factor(outer) == 3 and factor(inner) == 3
    first, last = mg.override.module(inner, DOUBLE), mg.override.module(inner, TRIPLE)
    assert factor(inner) == 3
    with pytest.raises(RuntimeError, match="replaced again since"):
        first.remove()
    last.remove()
    first.remove()
    assert factor(inner) == 1


def test_a_pickled_module_keeps_its_override():
    net = torch.nn.Linear(3, 1)
    mg.override.module(net, "linalg.vector_norm")
    again = pickle.loads(pickle.dumps(net))
    assert again.forward.module is again
    same(again(torch.ones(3)), net(torch.ones(3)))
    gc.collect()
