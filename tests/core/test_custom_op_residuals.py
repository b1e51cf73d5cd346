"""Custom ops: every kind of residual, how long it lives, and hooks, checkpoints and anomaly mode around it."""

import dataclasses
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import UNIT, define, saved_outputs, unit
from helpers.sine import factor, keep_x, loss_of, sine, times
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, nested
from torch.func import grad, jacrev, vjp
from torch.utils.checkpoint import checkpoint


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor
    number: float


torch.utils._pytree.register_dataclass(Box)


@pytest.mark.parametrize(
    "pack, unpack",
    [
        (lambda x: x, lambda r: r),
        (lambda x: {"a": [None, (x, 2.0)], "b": {}}, lambda r: r["a"][1][0] * r["a"][1][1] / 2),
        (lambda x: Pair(3, Pair(x, "text")), lambda r: r.second.first * len(r.second.second) / 4),
        (lambda x: Box(x, 2.0), lambda r: r.tensor * r.number / 2),
        (lambda x: [x, x, x], lambda r: r[2]),
        (lambda x: (None, x, 2.0), lambda r: r[1] * r[2] / 2),
        (lambda x: (x / 2, x), lambda r: r[0] + r[1] / 2),  # computed, so computed again for the next order
    ],
    ids=["tensor", "dict", "named tuple", "dataclass", "twice the same", "flat", "computed"],
)
def test_residuals_are_any_tree(pack, unpack):
    op = sine(
        save_for_backward=lambda inputs, output: pack(inputs.x), backward=lambda ctx, r, g: {"x": g * unpack(r).cos()}
    )
    for transforms in NESTINGS:
        f = nested(transforms, lambda x: op(x).square().sum())
        same(f(random(2)), nested(transforms, lambda x: x.sin().square().sum())(random(2)))
    for found, expected in zip(plain_orders(op), plain_orders(torch.sin), strict=True):
        same(found, expected)


def plain_orders(f):
    """Of plain calls, which have an autograd function of their own: three orders, a Hessian times a vector, batched gradients."""
    x = random(2).requires_grad_()
    found = [f(x).square().sum()]
    for _ in range(3):
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    x = random(2).requires_grad_()
    (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    (product,) = torch.autograd.grad(g, x, torch.arange(1.0, 3.0).double())
    batch = torch.autograd.grad(f(x).square().sum(), x, torch.arange(1.0, 4.0).double(), is_grads_batched=True)
    return [*(y.detach() for y in found), product, *batch]


@pytest.mark.parametrize("nothing", [None, (), {}, 3.0, "text"])
def test_residuals_without_tensors(nothing):
    seen = []
    op = define(
        "(Tensor x) -> Tensor",
        lambda x: 2 * x,
        save_for_backward=lambda inputs, output: nothing,
        backward=lambda ctx, saved, g: (seen.append(saved), {"x": 2 * g})[1],
    )
    same(grad(lambda x: op(x).sum())(random(3)), torch.full((3,), 2.0).double())
    assert seen == [nothing]


@pytest.mark.parametrize("what", ["input", "output"])
def test_a_changed_residual_is_caught(what):
    op = sine(
        save_for_backward=lambda inputs, output: inputs.x if what == "input" else output,
        backward=lambda ctx, saved, g: {"x": g * saved},
    )
    x = random(3).requires_grad_() * 1
    y = op(x)
    (x if what == "input" else y).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dual", [False, True], ids=["", "dual"])
@pytest.mark.parametrize("op", UNIT)
def test_nothing_leaks(op, dual):
    """Without the garbage collector: no cycle between a graph and what it saved."""
    gc.collect()
    gc.disable()
    try:
        with fwAD.dual_level():
            x = random(3).requires_grad_() * 1
            x = fwAD.make_dual(x, random(3)) if dual else x
            y, n = UNIT[op](x)
            alive = [weakref.ref(o) for o in (x, y, n, y.grad_fn)]
            assert all(r() is not None for r in alive)
            del x, y, n
        assert [r() for r in alive] == [None] * 4
    finally:
        gc.enable()


def test_saved_tensors_hooks():
    seen = []
    x = random(3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.detach(), lambda t: t * 2):
        y = sine(save_for_backward=keep_x, backward=lambda ctx, s, g: {"x": g * s})(x)
    same(torch.autograd.grad(y.sum(), x)[0], 2 * x.detach())
    assert seen == [(3,)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    x = random(3).requires_grad_()
    checkpoint(lambda x: loss_of(saved_outputs)(x * 1), x, use_reentrant=reentrant).backward()
    same(x.grad, grad(loss_of(unit))(x.detach()))


def test_hooks_retain_graph_and_second_backward():
    op, x, seen = sine(save_for_backward=keep_x, backward=times(1)), random(3).requires_grad_(), []
    y = op(x)
    y.register_hook(lambda g: 2 * g)
    y.grad_fn.register_hook(lambda gi, go: seen.append((len(gi), len(go))))
    for _ in range(2):
        same(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 2 * x.detach().cos())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    assert len(seen) == 3


def test_anomaly_mode_finds_the_op():
    op = sine(save_for_backward=keep_x, backward=times(float("nan")))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="returned nan values"):
        with torch.autograd.detect_anomaly():
            op(random(3).requires_grad_()).sum().backward()


def test_a_backward_may_use_autograd():
    def backward(ctx, x, g):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return {"x": torch.autograd.grad(x.sin(), x, g)[0]}

    assert factor(sine(save_for_backward=keep_x, backward=backward)) == 1
    op = sine(save_for_backward=keep_x, backward=lambda ctx, x, g: {"x": vjp(torch.sin, x)[1](g)[0]})
    assert factor(op) == 1
    same(jacrev(jacrev(lambda x: op(x).sum()))(random(3)), torch.diag(-random(3).sin()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", UNIT)
def test_without_gradients(op, context):
    with context():
        y, n = UNIT[op](random(3).requires_grad_())
    assert not y.requires_grad and not n.requires_grad
    same((y, n), unit(random(3)))
