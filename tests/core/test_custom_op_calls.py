"""The shorter ways of calls of custom ops: which calls take them, and that they are the same as through the dispatcher."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.calls import needs_library
from torch.autograd.profiler import profile

import torch_manualgrad as mg
from torch_manualgrad.core.internals import DispatchMode
from torch_manualgrad.core.op import shortcuts
from torch_manualgrad.core.op.shortcuts import untracked_calls
from torch_manualgrad.core.override import compiled_calls

numbers = itertools.count()
SCHEMA = "(Tensor x, float scale=1.0, Tensor? shift=None, *, bool flip=False) -> Tensor"


def made(save=True):
    """An op with a backward, and what its functions were called for."""
    seen = []

    @mg.custom_op(f"mgcalls::op{next(numbers)}{SCHEMA}")
    def op(x, scale=1.0, shift=None, *, flip=False):
        seen.append(("default", scale))
        y = scale * x.sin()
        return (-y if flip else y) if shift is None else y + shift

    if save:
        op.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.scale, inputs.shift is not None))

    @op.impl_backward
    def _(ctx, saved, grad):
        x, scale, shifted = saved
        seen.append(("backward", dict(ctx.needs_input_grad)))
        return {"x": grad * scale * x.cos(), "shift": grad.clone() if shifted else None}

    return op, seen


def vector(**options):
    return torch.linspace(-1, 1, 5, dtype=torch.float64, **options)


def untracked(call):
    """How many calls that autograd does not track ``call`` makes without Python."""
    before = untracked_calls()
    call()
    return untracked_calls() - before


@needs_library
def test_calls_without_gradient_enter_no_python_at_autograd():
    op, _ = made()
    x, tracked = vector(), vector(requires_grad=True)
    assert untracked(lambda: op(x)) == 1
    assert untracked(lambda: op.op(x, 2.0, shift=x, flip=True)) == 1
    assert untracked(lambda: op.op(tracked)) == 0
    with torch.no_grad():
        assert untracked(lambda: op(tracked)) == 1
        torch.testing.assert_close(op(tracked, 2.0), 2 * x.sin())
    assert untracked(lambda: op(tracked.detach(), shift=tracked)) == 0
    assert op(x, shift=tracked).requires_grad


@needs_library
def test_calls_that_are_not_plain_enter_python():
    op, _ = made()
    x = vector()
    assert untracked(lambda: torch.func.vmap(op)(x)) <= 5  # one for each element, at the end
    assert untracked(lambda: torch.func.grad(lambda x: op(x).sum())(x)) == 1  # below the transform
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert untracked(lambda: op(dual)) == 0
        tangent = torch.autograd.forward_ad.unpack_dual(op(dual)).tangent
        torch.testing.assert_close(tangent, x.cos())
    with torch._subclasses.FakeTensorMode() as mode:
        assert untracked(lambda: op(mode.from_tensor(x))) == 0
    with compiled_calls.in_python():
        assert untracked(lambda: op(x)) == 0


@needs_library
def test_errors_and_autograd_kernels_enter_python():
    half, _ = made(save=False)
    x = vector()
    with pytest.raises(RuntimeError, match="no save_for_backward"):
        half(x)
    half.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.scale, False))
    assert untracked(lambda: half(x)) == 1
    with half.swap(autograd=lambda x, *args, **kwargs: half.below_autograd(x) + 1):
        assert untracked(lambda: torch.testing.assert_close(half(x), x.sin() + 1)) == 0
    assert untracked(lambda: half(x)) == 1


def test_an_op_with_lists_is_for_python():
    @mg.custom_op("mgcalls::of_a_list(Tensor[] xs) -> Tensor")
    def op(xs):
        return xs[0] * 2

    assert untracked(lambda: op([vector()])) == 0 and op._tracked_call is None


def test_an_op_is_redefined():
    for factor in (2, 3):

        @mg.custom_op("mgcalls::again(Tensor x) -> Tensor", redefine=True)
        def op(x, factor=factor):
            return factor * x

        assert op(vector()).equal(factor * vector())


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Mode(DispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct(monkeypatch):
    """The calls that were made without the dispatcher, or not."""
    seen = []
    own = shortcuts.tracked_call

    def spied(derivative):
        call = own(derivative)
        if call is None:
            return None

        def spy(args):
            found = call(args)
            seen.append(found is not NotImplemented)
            return found

        return spy

    monkeypatch.setattr("torch_manualgrad.core.op.custom_op.tracked_call", spied)
    return seen


def test_tracked_calls_go_at_once(direct):
    op, seen = made()
    x, shift = vector(requires_grad=True), vector(requires_grad=True)
    for args in ((x,), (x, 2.0), (x, 2.0, shift), (x.detach(), 2.0, shift), (torch.nn.Parameter(x.detach()), 1.5)):
        direct.clear()
        seen.clear()
        wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        found, expected = op(*args), op.op(*args)
        assert direct == [True] and found.grad_fn.name() == expected.grad_fn.name()
        for y in (found, expected):
            seen.append([g.tolist() for g in torch.autograd.grad(y.square().sum(), wanted)])
        assert seen[0] == seen[1] and seen[-1] == seen[-3] and seen[-2] == seen[-4]


def test_all_others_go_through_the_dispatcher(direct):
    op, seen = made()
    x = vector(requires_grad=True)
    op(x, 2)  # which the schema has as 2.0
    assert seen[-1] == ("default", 2.0) and type(seen[-1][1]) is float
    op(x, torch.tensor(2.0).item(), None)
    assert direct == [False, True]
    op(x, scale=2.0)
    op(x, 1.0, None, flip=True)
    assert direct == [False, True]  # keywords are not looked at
    direct.clear()
    for wrong in ((), (x, "a"), (x, 1.0, None, True), (3,), ([x],)):
        with pytest.raises((RuntimeError, TypeError)):
            op(*wrong)
    with torch.no_grad():
        op(x)
    with torch.autocast("cpu"):
        op(x)
    with FunctionMode() as functions:
        op(x)
    assert functions.seen == [op.op]
    with Mode():
        op(x)
    with torch._C._AutoDispatchBelowAutograd():
        op(x)
    torch.func.vmap(op)(x.expand(2, 5))
    torch.func.grad(lambda x: op(x).sum())(x)
    torch.autograd.functional.jacobian(op, x.detach(), vectorize=True)  # the older vmap
    assert not any(direct[:-1])


def test_tensors_of_a_finished_transform(direct):
    op, _ = made()
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(vector())
    assert op(left[0]).equal(vector().sin())
    assert not any(direct)


def test_a_rule_on_a_custom_op_has_all_calls(direct):
    op, _ = made()
    x = vector(requires_grad=True)
    op(x)
    rule = mg.rule(op.name, vjp={"x": lambda grad, x: 7 * grad}, register=False)
    with mg.override(rule):
        assert torch.autograd.grad(op(x).sum(), x)[0].eq(7).all()
    torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], x.detach().cos())
    assert direct == [True]


def test_hooks_modes_and_the_profiler_see_the_call(direct):
    op, seen = made()
    x = vector(requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        y = op(x)
    assert packed == [1]
    with profile() as profiled:
        op(x)
    assert op.name in {event.name for event in profiled.function_events}
    checkpointed = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False)
    for found in (y, checkpointed):
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x, create_graph=True)[0], x.cos())
    assert all(direct)


def test_compiled_calls(direct):
    op, _ = made()
    x = vector(requires_grad=True)
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], 2 * x.detach().cos())
    assert not any(direct)
