"""Normalizations beside the same made of elementwise operators and means, which PyTorch differentiates rightly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.calls import names_of_nodes
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import functional_call, hessian, jacrev, jvp, vjp

import torch_manualgrad as mg
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.derivatives.nn import batch_norm as batch_norm_rules, rms_norm as rms_norm_rules

F64 = torch.float64
EPS = 0.1


def composite(x, dims, w, b, centered=True):
    m = x.mean(dims, keepdim=True) if centered else 0.0
    y = (x - m) * ((x - m).square().mean(dims, keepdim=True) + EPS).rsqrt()
    return y * w + b


def second(f, *given):
    given = [g.detach().requires_grad_() for g in given]
    first = torch.autograd.grad(f(*given).sum(), given, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.sum() for g in first), given, allow_unused=True, materialize_grads=True)]


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_a_plain_training_step_is_pytorchs_own(name, dtype):
    f, _, n = CASES[name]
    seen = []
    for scope in (mg.override("linalg.det"), mg.override()):
        x, w, b = inputs(n, dtype)
        with scope:
            y = f(x, w, b)
            names = names_of_nodes(y.grad_fn)
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


# -- special inputs ---------------------------------------------------------------------------------------------------


def test_empty_batches():
    w, b = random(3), random(3, seed=1)
    with mg.override("*"):
        for f, x in (
            (lambda x, w, b: F.layer_norm(x, [3], w, b), torch.zeros(0, 3, dtype=F64)),
            (lambda x, w, b: F.batch_norm(x, w.detach(), b.detach() ** 2, w, b), torch.zeros(0, 3, dtype=F64)),
            (
                lambda x, w, b: torch.native_batch_norm(x, w, b, w.detach(), b.detach() ** 2, False, 0.1, EPS)[0],
                torch.zeros(0, 3, dtype=F64),  # on which PyTorch's backward ends the process
            ),
        ):
            for g, like in zip(second(f, x, w, b), (x, w, b) * 2):
                assert g.shape == like.shape and not g.any()


def test_constant_rows():
    """The variance is 0, and r = eps^-1/2; with eps = 0 nothing is defined."""
    x = torch.full((2, 4), 3.0, dtype=F64)
    with mg.override("*"):
        H = hessian(lambda x: F.layer_norm(x, [4], eps=EPS).square().sum())(x)
    torch.testing.assert_close(H, hessian(lambda x: composite(x, (1,), 1.0, 0.0).square().sum())(x))


@pytest.mark.parametrize("size", [1e6, 1e-6])
def test_sizes_far_from_one(size):
    x = (size * random(3, 5)).requires_grad_()
    W = random(3, 5, seed=1)
    seen = []
    with mg.override("*"):
        for f in (lambda x: F.layer_norm(x, [5], eps=1e-5), lambda x: composite_with(x, 1e-5)):
            (g,) = torch.autograd.grad((W * f(x)).sum(), x, create_graph=True)
            seen.append((g, *torch.autograd.grad((W * g).sum(), x)))
    for a, e in zip(*seen):
        torch.testing.assert_close(a / e.abs().max(), e / e.abs().max(), rtol=1e-7, atol=1e-7)


def composite_with(x, eps):
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()


def test_a_gradient_of_running_statistics_raises():
    x, mean, variance = random(5, 3), random(3), random(3, seed=1).square().requires_grad_()
    with mg.override("*"), pytest.raises(NotImplementedError):
        F.batch_norm(x.requires_grad_(), mean, variance).sum().backward()


# -- modules ----------------------------------------------------------------------------------------------------------

nn = torch.nn
MODULES = {
    "LayerNorm": (nn.LayerNorm(3), (2, 3), (1,)),
    "BatchNorm1d": (nn.BatchNorm1d(3), (4, 3), (0,)),
    "BatchNorm2d": (nn.BatchNorm2d(2), (2, 2, 1, 2), (0, 2, 3)),
    "BatchNorm1d in evaluation": (nn.BatchNorm1d(3).eval(), (4, 3), None),
    "GroupNorm": (nn.GroupNorm(1, 2), (2, 2, 2), (1, 2)),
    "InstanceNorm2d": (nn.InstanceNorm2d(2, affine=True), (1, 2, 2, 2), (2, 3)),
    "RMSNorm": (nn.RMSNorm(3), (2, 3), None),
}


def by_hand(module, dims, x, weight, bias):
    shape = (-1, *[1] * (x.dim() - 2)) if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else (-1,)
    w = weight.reshape(shape)
    if isinstance(module, nn.RMSNorm):
        return x * (x.square().mean(-1, keepdim=True) + torch.finfo(F64).eps).rsqrt() * w
    if dims is None:
        return (x - module.running_mean) * (module.running_var + module.eps).rsqrt() * w + bias
    rest = x - x.mean(dims, keepdim=True)
    return rest * (rest.square().mean(dims, keepdim=True) + module.eps).rsqrt() * w + bias.reshape(shape)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
def test_modules(name, which):
    module, shape, dims = MODULES[name]
    module = module.double()
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    parameters = {n: random(*p.shape, seed=k) for k, (n, p) in enumerate(module.named_parameters())}
    x, W = random(*shape, seed=5), random(*shape, seed=6)

    def f(x, *values):
        state = {**{n: b.clone() for n, b in buffers.items()}, **dict(zip(parameters, values))}
        return functional_call(module, state, (x,))

    given = (x, *parameters.values())
    leaves = [g.clone().requires_grad_() for g in given]

    def loss(g):
        return lambda *given: (W * g(*given).sin()).sum()

    def reference(x, weight, bias=None):
        return by_hand(module, dims, x, weight, bias)

    argnums = tuple(range(len(given)))
    with mg.override(*which):
        assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True)
        found = hessian(loss(f), argnums)(*given)
        again = jacrev(jacrev(loss(f), argnums), argnums)(*given)
    expected = hessian(loss(reference), argnums)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-9)


# -- formulas that no operator of the CPU reaches ---------------------------------------------------------------------


def test_the_formulas_of_rms_norm():
    x, w, g, gr = random(2, 3), random(3, seed=1), random(2, 3, seed=2), random(2, 1, seed=3)
    dx, dw = random(2, 3, seed=4), random(3, seed=5)

    def forward(x, w):
        r = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return x * r * w, r

    def backward(g, x, w):
        return mg.ops.infinitely_differentiable_native_rms_norm_backward(g, None, x, [3], forward(x, w)[1].detach(), w)

    r = forward(x, w)[1]
    found = mg.ops.infinitely_differentiable_native_rms_norm_backward(g, gr, x, [3], r, w)
    torch.testing.assert_close(found, vjp(forward, x, w)[1]((g, gr)))
    tangents = jvp(forward, (x, w), (dx, dw))[1]
    torch.testing.assert_close(mg.ops.rms_norm_jvp(x, dx, w, dw, r, [3]), tangents[0])
    torch.testing.assert_close(mg.ops.rms_norm_rstd_jvp(x, dx, r, [3]), tangents[1])

    def exact(g, x, w):
        return vjp(lambda x, w: forward(x, w)[0], x, w)[1](g)

    expected = vjp(exact, g, x, w)[1]((dx, dw))
    of_x, of_w, of_g = mg.ops.rms_norm_double_backward(x, w, dx, dw, g, [3], r)
    torch.testing.assert_close((of_g, of_x, of_w), expected)
    given = [t.clone().requires_grad_() for t in (g, x, w)]
    assert torch.autograd.gradcheck(
        lambda *t: jacrev(lambda s: backward(t[0] * s, t[1], t[2])[0])(torch.ones((), dtype=F64)), given
    )
    torch.testing.assert_close(vjp(backward, g, x, w)[1]((dx, dw)), expected)


@pytest.mark.parametrize("rule", [*batch_norm_rules.GPU_RULES, *rms_norm_rules.GPU_RULES], ids=lambda r: r.name)
def test_the_rules_of_gpus_bind(rule):
    """Their formulas, given what the CPU's operator saves in the place of the GPU's."""
    if "rms" in rule.name:
        return
    x, w, b, g = random(4, 3), random(3, seed=1), random(3, seed=2), random(4, 3, seed=3)
    y, *saved = torch.native_batch_norm(x, w, b, None, None, True, 0.1, EPS)
    rest = [None] * (len(rule.signature.returns) - 3)
    if rule.name.endswith("backward"):
        values = (x, g, w, None, None, *saved, EPS, *[torch.empty(0)] * ("cudnn" in rule.name))
        outputs: tuple = (None, None, None)
        cotangents = (random(4, 3, seed=4), random(3, seed=5), random(3, seed=6))
        expected = vjp(lambda x, g, w: vjp(lambda x, w: composite(x, (0,), w, 0.0), x, w)[1](g), x, g, w)[1](
            cotangents[:2]
        )
        expected = (expected[0], expected[1] + cotangents[2], expected[2])
        needed = (True, True, True)
    else:
        values = (x, w, b, None, None, True, 0.1, EPS)
        outputs, cotangents = (y, *saved, *rest), (g, None, None, *rest)
        expected = vjp(lambda x, w, b: composite(x, (0,), w, b), x, w, b)[1](g)
        needed = (True, True, True)
    needed = (*needed, *[False] * (len(values) - 3))
    tensors, static = derivative_of(rule).residuals(values, outputs)
    found = derivative_of(rule).vjp(needed, tensors, static, cotangents)[:3]
    torch.testing.assert_close(tuple(found), tuple(expected))
    tangents = (random(4, 3, seed=7), random(*values[1].shape, seed=8), random(3, seed=9), *[None] * (len(values) - 3))
    found = derivative_of(rule).jvp(values, outputs, tangents)
    assert found[0].shape == x.shape and found[0].isfinite().all()
