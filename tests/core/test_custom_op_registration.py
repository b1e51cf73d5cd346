"""Custom ops: implementations that are replaced or swapped, a whole autograd kernel, and ops that are defined again."""

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from helpers.sine import factor, keep_x, sine, times
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, nested
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg

# -- registration and swapping ---------------------------------------------------------------------------------------


def test_implementations_can_be_replaced():
    op = sine(save_for_backward=keep_x, backward=times(2))
    y = op(x := random(3).requires_grad_())
    op.impl_backward(times(3))
    assert factor(op) == 3
    same(torch.autograd.grad(y.sum(), x)[0], 2 * x.detach().cos())  # the call keeps what was active when it ran
    op.impl_autograd(lambda x: op.below_autograd(x) + x)
    same(op(random(3)), random(3).sin() + random(3))


def test_kernels_by_device():
    op = sine()
    op.impl("cpu")(lambda x: x.sin() + 1)
    same(op(random(3)), random(3).sin() + 1)
    assert op(torch.ones(3, device="meta")).shape == (3,)
    with op.swap(cpu=None):
        same(op(random(3)), random(3).sin())
    op.impl("default")(lambda x: x.sin() + 2)
    with op.swap(cpu=None):
        same(op(random(3)), random(3).sin() + 2)
    same(op(random(3)), random(3).sin() + 1)


@pytest.fixture
def op():
    return sine(save_for_backward=keep_x, backward=times(1))


def test_swaps_nest_and_survive_exceptions(op):
    with op.swap(backward=times(2)) as same_op:
        assert same_op is op and factor(op) == 2
        with contextlib.suppress(ZeroDivisionError), op.swap(backward=times(3)):
            assert factor(op) == 3
            1 / 0  # noqa: B018
        assert factor(op) == 2
    assert factor(op) == 1


def test_swaps_end_in_any_order(op):
    a, b = op.swap(backward=times(2)), op.swap(backward=times(3))
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert factor(op) == 3
    b.__exit__(None, None, None)
    assert factor(op) == 1
    with a, a:
        assert factor(op) == 2
    assert factor(op) == 1


def test_swap_of_every_kind(op):
    with op.swap(jvp=lambda inputs, output, tangents: 5 * tangents.x):
        same(jvp(op, (random(3),), (random(3),))[1], 5 * random(3))
    with op.swap(save_for_backward=lambda inputs, output: 0 * inputs.x):
        same(grad(lambda x: op(x).sum())(random(3)), torch.ones(3).double())
    with op.swap(autograd=lambda x: 7 * op.below_autograd(x)):
        same(op(random(3)), 7 * random(3).sin())
    with op.swap(vmap=lambda info, in_dims, x: (x, in_dims.x)):
        same(vmap(op)(random(2, 3)), random(2, 3))
    with op.swap(fake=lambda x: x.new_empty(7)):
        assert op(torch.ones(3, device="meta")).shape == (7,)
    with op.swap(default=lambda x: x.cos()):
        same(op(random(3)), random(3).cos())
    with op.swap(backward=None, save_for_backward=None), pytest.raises(RuntimeError, match="no derivative in reverse"):
        op(random(3).requires_grad_())
    assert factor(op) == 1


def test_swap_of_output_differentiability(op):
    x = random(3).requires_grad_()
    with op.swap(backward=times(2), output_differentiability=[False]):
        assert not op(x).requires_grad
    assert op(x).requires_grad


def test_swaps_of_two_threads_interleaved(op):
    """The last one entered wins, in every thread, and leaving it brings back the other."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with op.swap(backward=times(3)):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with op.swap(backward=times(2)):
        thread.start()
        assert entered.wait(60) and factor(op) == 3
    assert factor(op) == 3
    leave.set()
    thread.join()
    assert factor(op) == 1


def test_swapping_while_other_threads_differentiate(op):
    stop, seen, failures = threading.Event(), set(), []

    def work():
        while not stop.is_set():
            try:
                seen.add(factor(op))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(300):
        with op.swap(backward=times(2)):
            pass
    stop.set()
    for t in threads:
        t.join()
    assert not failures and seen <= {1.0, 2.0} and factor(op) == 1


# -- a whole autograd kernel -----------------------------------------------------------------------------------------


def test_setup_context_style_in_a_whole_kernel():
    class Sine(mg.SingleLevelFunction):
        @staticmethod
        def forward(x):
            return op.below_autograd(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, t):
            return t * ctx.saved_tensors[0].cos()

    op = sine(autograd=Sine.apply)
    for transforms in NESTINGS:
        f, g = (nested(transforms, lambda x, s=s: s(x).square().sum())(random(2)) for s in (op, torch.sin))
        same(f, g)


def test_a_whole_kernel_goes_before_the_pair():
    op = sine(save_for_backward=keep_x, backward=times(2), autograd=lambda x: x * 3)
    assert not (op(random(3)) - 3 * random(3)).any()
    with op.swap(autograd=None):
        assert factor(op) == 2


# -- defined again ----------------------------------------------------------------------------------------------------


def test_redefine_replaces_the_op_with_all_that_is_registered_for_it():
    def define(schema, factor):
        @mg.custom_op(f"redefined::op{schema}", redefine=True)
        def op(x, y=1.0):
            return factor * y * x

        return op

    first = define("(Tensor x) -> Tensor", 2)
    first.impl_save_for_backward(lambda inputs, output: None)
    first.impl_backward(lambda ctx, saved, grad: {"x": 2 * grad})
    first.impl("cpu")(lambda x: 2 * x)
    compiled = torch.compile(lambda x: torch.ops.redefined.op(x), backend="aot_eager")
    x = random(3).requires_grad_()
    same(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 2.0).double())
    with pytest.raises(ValueError, match="already defined; a duplicate name is an error .custom_op.*redefine=True"):
        mg.custom_op("redefined::op(Tensor x) -> Tensor")(lambda x: x)

    second = define("(Tensor x) -> Tensor", 3)
    same(torch.ops.redefined.op(x.detach()), 3 * x.detach())
    with pytest.raises(RuntimeError, match="redefined::op has no derivative in reverse mode"):
        second(x)
    second.impl_save_for_backward(lambda inputs, output: None)
    second.impl_backward(lambda ctx, saved, grad: {"x": 3 * grad})
    same(torch.autograd.grad(compiled(x).sum(), x)[0], torch.full((3,), 3.0).double())

    other = define("(Tensor x, float y=1.0) -> Tensor", 5)
    same(other(x.detach(), 2.0), 10 * x.detach())
    same(compiled(x.detach()), 5 * x.detach())
    with pytest.raises(ValueError, match="already defined"):
        mg.custom_op("aten::sin(Tensor x) -> Tensor", redefine=True)(lambda x: x)


# -- copies ----------------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.weight = op, torch.nn.Parameter(random(3))

    def forward(self, x):
        return self.op(self.weight * x)


@pytest.mark.parametrize("of", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_module_that_has_an_op_is_copied(of):
    op = sine(save_for_backward=keep_x, backward=times(2))
    module = of(Module(op))
    assert module.op is op
    x = random(3, seed=1)
    same(torch.autograd.grad(module(x).sum(), module.weight)[0], 2 * x * (module.weight * x).cos().detach())
    writes = mg.custom_op(f"{op.name}_write(Tensor(a!) x) -> ()")(lambda x: None)
    assert of(writes) is writes and of(writes.functional) is writes.functional


def test_an_op_that_is_not_there_any_more_is_not_copied():
    schema = "mgtest::copied(Tensor x) -> Tensor"
    old = mg.custom_op(schema)(torch.sin)
    data = pickle.dumps(old)
    new = mg.custom_op(schema, redefine=True)(torch.cos)
    assert pickle.loads(data) is new
    with pytest.raises(pickle.PicklingError, match="mgtest::copied was redefined"):
        copy.deepcopy(old)
    new.undefine()
    with pytest.raises(pickle.UnpicklingError, match="mgtest::copied is not defined in this process"):
        pickle.loads(data)
