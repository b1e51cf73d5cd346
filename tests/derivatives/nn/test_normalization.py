"""Normalizations beside the same made of elementwise operators and means, which PyTorch differentiates rightly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.normalizations import EPS, F64, composite
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import jvp

import torch_manualgrad as mg

RUNNING = (torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=F64), torch.tensor([0.7, 1.3, 0.9, 1.1], dtype=F64))


def by_channel(p):
    return p[:, None]


def in_groups(x, w, b):
    return composite(x.reshape(3, 2, 10), (2,), 1.0, 0.0).reshape(x.shape) * by_channel(w) + by_channel(b)


def in_evaluation(x, w, b):
    mean, variance = map(by_channel, RUNNING)
    return (x - mean) * (variance + EPS).rsqrt() * by_channel(w) + by_channel(b)


def batch_norm(x, w, b, training=True):
    return F.batch_norm(x, *(s.clone().to(x.dtype) for s in RUNNING), w, b, training, 0.1, EPS)


def on_running_statistics(op, x, w, b, *flags):
    return getattr(torch.ops.aten, op)(x, w, b, *(s.clone().to(x.dtype) for s in RUNNING), *flags, 0.1, EPS)[0]


# name -> (function of x of shape (3, 4, 5), weight and bias; the same by elementwise operators; size of the parameters)
CASES = {
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, [5], w, b, EPS), lambda x, w, b: composite(x, (2,), w, b), 5
    ),
    "batch_norm": (
        batch_norm, lambda x, w, b: composite(x, (0, 2), by_channel(w), by_channel(b)), 4
    ),
    "batch_norm in evaluation": (lambda x, w, b: batch_norm(x, w, b, False), in_evaluation, 4),
    "batch_norm without running statistics": (
        lambda x, w, b: torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, EPS)[0],
        lambda x, w, b: composite(x, (0, 2), by_channel(w), by_channel(b)), 4,
    ),
    **{
        f"aten::{op}": (
            lambda x, w, b, op=op, flags=flags: on_running_statistics(op, x, w, b, *flags),
            lambda x, w, b: composite(x, (0, 2), by_channel(w), by_channel(b)), 4,
        )
        for op, flags in (("_native_batch_norm_legit", (True,)), ("_batch_norm_with_update", ()))
    },
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, None, None, w, b, True, 0.1, EPS),
        lambda x, w, b: composite(x, (2,), by_channel(w), by_channel(b)), 4,
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b, EPS), in_groups, 4),
    "rms_norm": (
        lambda x, w, b: F.rms_norm(x, [5], w, EPS) + b, lambda x, w, b: composite(x, (2,), w, b, False), 5
    ),
}  # fmt: skip
MENDED = (*[name for name in CASES if "batch_norm" in name and "evaluation" not in name], "layer_norm", "instance_norm")


def loss_along(f, n):
    """A smooth loss on a line through x, the weight and the bias: a function of one number."""
    starts = [random(3, 4, 5), 1 + 0.3 * random(n, seed=1), random(n, seed=2)]
    directions = [random(3, 4, 5, seed=3), random(n, seed=4), random(n, seed=5)]
    W = random(3, 4, 5, seed=6)

    def loss(t):
        return (W * f(*[s + t * d for s, d in zip(starts, directions)]).sin()).sum()

    return loss


NESTINGS = ["".join(n) for n in itertools.product("fr", repeat=3)]


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("name", CASES)
def test_second_and_third_order_in_every_nesting(name, which):
    f, reference, n = CASES[name]
    expected = [differentiated(loss_along(reference, n), "r" * order, 0.2) for order in (2, 3)]
    with mg.override(*which):
        for nesting in (*("".join(n) for n in itertools.product("fr", repeat=2)), *NESTINGS):
            found = differentiated(loss_along(f, n), nesting, 0.2)
            torch.testing.assert_close(found, expected[len(nesting) - 2], rtol=1e-9, atol=1e-9, msg=nesting)


@pytest.mark.parametrize("name", MENDED)
def test_pytorch_is_silently_wrong(name):
    f, reference, n = CASES[name]
    right = {k: differentiated(loss_along(reference, n), "r" * k, 0.2).item() for k in (2, 3)}
    wrong = []
    for nesting in ("ff", "rf", *NESTINGS):
        try:
            found = differentiated(loss_along(f, n), nesting, 0.2).item()
        except RuntimeError:  # of some nestings, on some torches
            continue
        if not math.isclose(found, right[len(nesting)], rel_tol=1e-6):
            wrong.append(nesting)
    assert {"ff", "rf"} <= set(wrong) and any(len(w) == 3 for w in wrong)


def test_third_order_of_the_plain_graph():
    """Three times torch.autograd.grad: the plain call stays with PyTorch, and its backward does not."""
    for name, (f, reference, n) in CASES.items():
        found = []
        for function, scope in ((f, mg.override()), (reference, mg.override())):
            t = torch.tensor(0.2, dtype=F64, requires_grad=True)
            with scope:
                y = loss_along(function, n)(t)
                for _ in range(3):
                    (y,) = torch.autograd.grad(y, t, create_graph=True)
            found.append(y)
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9, msg=name)


# -- what is PyTorch's stays so ---------------------------------------------------------------------------------------


def inputs(n, dtype=F64):
    return [x.to(dtype).requires_grad_() for x in (random(3, 4, 5), 1 + 0.3 * random(n, seed=1), random(n, seed=2))]


def nodes(fn):
    """The names of all nodes of a graph."""
    found, todo = [], [fn]
    while todo:
        node = todo.pop()
        found.append(node.name())
        todo += [n for n, _ in node.next_functions if n is not None]
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_a_plain_training_step_is_pytorchs_own(name, dtype):
    f, _, n = CASES[name]
    seen = []
    for scope in (mg.override("linalg.det"), mg.override()):
        x, w, b = inputs(n, dtype)
        with scope:
            y = f(x, w, b)
            names = nodes(y.grad_fn)
            y.sin().sum().backward()
        seen.append((names, [y.detach(), x.grad, w.grad, b.grad]))
    (stock_nodes, stock), (our_nodes, ours) = seen
    assert our_nodes == stock_nodes
    for a, b in zip(ours, stock):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
def test_first_and_second_reverse_derivatives_are_pytorchs_to_rounding(name, which):
    f, _, n = CASES[name]
    seen = []
    for scope in (mg.override("linalg.det"), mg.override(*which)):
        given = inputs(n)
        with scope:
            first = torch.autograd.grad(f(*given).sin().sum(), given, create_graph=True)
            seen.append([*first, *torch.autograd.grad(sum(g.cos().sum() for g in first), given)])
    torch.testing.assert_close(*seen, rtol=1e-11, atol=1e-11)
    assert [g.stride() for g in seen[0]] == [g.stride() for g in seen[1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["", "float32 parameters"])
@pytest.mark.parametrize("name", ["layer_norm", "batch_norm without running statistics", "group_norm"])
def test_half_precision_against_double(name, dtype, parameters):
    f, reference, n = CASES[name]
    x, w, b = inputs(n, dtype)
    w, b = (p.detach().to(parameters or dtype).requires_grad_() for p in (w, b))
    given = (x, w, b)
    tangents = [random(*t.shape, seed=7).to(t.dtype) for t in given]

    def values(f, given, tangents):
        first = torch.autograd.grad(f(*given).sum(1).sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum((g * t).sum() for g, t in zip(first, tangents)), given)
        forward = jvp(f, tuple(g.detach() for g in given), tuple(tangents))[1]
        return [*first, *second, forward]

    with mg.override("*"):
        found = values(f, given, tangents)
    assert [g.dtype for g in found[:6]] == [t.dtype for t in given] * 2
    exact = values(reference, [t.detach().double().requires_grad_() for t in given], [t.double() for t in tangents])
    for a, e in zip(found, exact, strict=True):
        assert (a.double() - e).norm() <= 40 * torch.finfo(dtype).eps * (1 + e.norm())


def test_channels_last_stays_so():
    for which in ((), ("*",)):
        x = random(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
        with mg.override(*which):
            y = F.batch_norm(x, None, None, training=True)
            (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            (h,) = torch.autograd.grad(g.sin().sum(), x)
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, g, h))


def in_training(op, *flags):
    return lambda x, *statistics: op(x, torch.ones(3, dtype=F64), None, *statistics, *flags, 0.1, EPS)[0]


# what writes to running statistics, whether its schema says so or not
UPDATES = {
    "F.batch_norm": lambda x, mean, variance: F.batch_norm(x, mean, variance, training=True),
    "native_batch_norm": in_training(torch.native_batch_norm, True),
    "_native_batch_norm_legit": in_training(torch.ops.aten._native_batch_norm_legit.default, True),
    "_batch_norm_with_update": in_training(torch.ops.aten._batch_norm_with_update.default),
}


@pytest.mark.parametrize("name", UPDATES)
def test_running_statistics_are_updated_once(name):
    x, f = random(6, 3).requires_grad_(), UPDATES[name]
    seen = []
    for scope in (mg.override("linalg.det"), mg.override(), mg.override("*")):
        mean, variance = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)
        with scope:
            f(x, mean, variance).sum().backward()
            jvp(lambda x: f(x, mean, variance), (x.detach(),), (x.detach(),))
            torch.func.grad(lambda x: f(x, mean, variance).sum())(x.detach())
            jvp(torch.func.grad(lambda x: f(x, mean, variance).sum()), (x.detach(),), (x.detach(),))
            f(x.detach(), mean, variance)
        assert not mean.requires_grad and not variance.requires_grad
        seen.append(torch.cat((mean, variance, torch.tensor([float(mean._version)]))))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
