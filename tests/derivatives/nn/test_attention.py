"""The CPU's fused attention beside the formula of matrix products and a softmax, which PyTorch differentiates rightly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.calls import is_pytorchs
from helpers.tensors import random
from helpers.transforms import differentiated
from torch.func import hessian, jacrev, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_manualgrad as mg
from torch_manualgrad.derivatives.nn import attention

F64 = torch.float64
L, S = 5, 6


def heads(heads, length, seed=0):
    return random(1, heads, length, 4, seed=seed)


def reference(q, k, v, mask=None, is_causal=False, scale=None):
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v


def some_hidden(*shape):
    return random(*shape, seed=8).masked_fill(random(*shape, seed=9) > 1, -torch.inf)


# name -> (heads of keys and values, mask, other arguments)
CASES = {
    "plain": (2, None, {}),
    "causal": (2, None, {"is_causal": True}),
    "scale": (2, None, {"scale": 0.3}),
    "shared heads": (1, None, {"enable_gqa": True}),
    "mask": (2, some_hidden(L, S), {}),
    "mask of keys": (2, some_hidden(1, 1, 1, S), {}),
    "mask of each head, shared heads": (1, some_hidden(1, 2, L, S), {"enable_gqa": True, "scale": 0.3}),
}


def functions(name):
    """Attention as PyTorch calls it and by matrix products, as functions of q, k, v."""
    _, mask, options = CASES[name]
    known = {n: x for n, x in options.items() if n != "enable_gqa"}
    return (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, **options),
        lambda q, k, v: reference(q, k, v, mask, **known),
    )


def inputs(name):
    n = CASES[name][0]
    return heads(2, L), heads(n, S, 1), heads(n, S, 2)


def loss_along(f, starts):
    """A smooth loss on a line through the inputs: a function of one number."""
    directions = [random(*x.shape, seed=3 + i) for i, x in enumerate(starts)]
    W = random(1, 2, L, 4, seed=7)
    return lambda t: (W * f(*[x + t * d for x, d in zip(starts, directions)]).sin()).sum()


NESTINGS = ["".join(n) for order in (1, 2, 3) for n in itertools.product("fr", repeat=order)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, the last one not full."""
    monkeypatch.setattr(attention, "ROWS", 2)


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
@pytest.mark.parametrize("name", CASES)
def test_every_nesting_to_third_order(name, which):
    f, expected = functions(name)
    known = [differentiated(loss_along(expected, inputs(name)), "r" * order, 0.2) for order in (1, 2, 3)]
    with mg.override(*which):
        for nesting in NESTINGS:
            found = differentiated(loss_along(f, inputs(name)), nesting, 0.2)
            torch.testing.assert_close(found, known[len(nesting) - 1], rtol=1e-9, atol=1e-9, msg=nesting)


@pytest.mark.parametrize("name", CASES)
def test_tangents_and_second_derivatives_of_single_inputs(name):
    f, expected = functions(name)
    given = inputs(name)
    tangents = tuple(random(*x.shape, seed=4 + i) for i, x in enumerate(given))

    def losses(f):
        return lambda *given: f(*given).sin().sum()

    with mg.override():
        torch.testing.assert_close(jvp(f, given, tangents), jvp(expected, given, tangents))
        second = jacrev(jacrev(losses(f), (0, 1, 2)), (0, 1, 2))(*given)
        mixed = hessian(losses(f), (0, 1, 2))(*given)
    known = hessian(losses(expected), (0, 1, 2))(*given)
    torch.testing.assert_close(second, known)
    torch.testing.assert_close(mixed, known)


def test_pytorch_has_neither_forward_mode_nor_second_order():
    q, k, v = inputs("plain")
    with pytest.raises(NotImplementedError):
        jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (q,))
    x = q.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.scaled_dot_product_attention(x, k, v).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(g.sum(), x)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_a_plain_training_step_is_pytorchs_own(dtype):
    seen = []
    for scope in (mg.override("linalg.det"), mg.override()):
        given = [x.to(dtype).requires_grad_() for x in inputs("plain")]
        with scope:
            y = F.scaled_dot_product_attention(*given)
            node = y.grad_fn
            y.sin().sum().backward()
        seen.append([y, *[x.grad for x in given]])
        assert node.name() == "ScaledDotProductFlashAttentionForCpuBackward0" and is_pytorchs(node)
    for a, b in zip(*seen):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_three_times_autograd_grad():
    """The plain call stays with PyTorch, and its backward does not."""
    for name in ("plain", "causal", "mask"):
        found = []
        for f in functions(name):
            t = torch.tensor(0.2, dtype=F64, requires_grad=True)
            with mg.override():
                y = loss_along(f, inputs(name))(t)
                for _ in range(3):
                    (y,) = torch.autograd.grad(y, t, create_graph=True)
            found.append(y)
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", ["causal", "shared heads"])
def test_autograd_keeps_no_scores(name, order, monkeypatch):
    """What it saves for a derivative of this order is less than one matrix of scores; where it saves those, it is many."""
    length = 256
    monkeypatch.setattr(attention, "ROWS", 32)
    given = [x.requires_grad_() for x in (heads(2, length), *(heads(CASES[name][0], length, seed) for seed in (1, 2)))]
    saved = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x
        return x

    def elements(f):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = f(*given).sum()
            for _ in range(order - 1):
                y = sum(g.sin().sum() for g in torch.autograd.grad(y, given, create_graph=True))
        return sum(x.untyped_storage().nbytes() // x.element_size() for x in saved.values())

    f, expected = functions(name)
    with mg.override():
        assert elements(f) < length * length
    assert elements(expected) > 6 * length * length


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_against_double(dtype):
    given = tuple(x.to(dtype) for x in inputs("causal"))
    tangents = tuple(random(*x.shape, seed=4).to(dtype) for x in given)
    f, expected = functions("causal")

    def values(f, given, tangents):
        first = vjp(f, *given)[1](tangents[0])
        return [jvp(f, given, tangents)[1], *jvp(lambda *x: vjp(f, *x)[1](tangents[0]), given, tangents)[1], *first]

    with mg.override():
        found = values(f, given, tangents)
    exact = values(expected, tuple(x.double() for x in given), tuple(x.double() for x in tangents))
    for a, e in zip(found, exact, strict=True):
        assert a.dtype == dtype and (a.double() - e).norm() <= 10 * torch.finfo(dtype).eps * (1 + e.norm())


def test_a_query_that_attends_to_no_key():
    """Its result is 0, and so are all derivatives."""
    q, k, v = inputs("plain")
    mask = torch.zeros(L, S, dtype=F64)
    mask[1], mask[3, 2:] = -torch.inf, -torch.inf

    def f(q):
        return F.scaled_dot_product_attention(q, k, v, mask)

    rest = [0, 2, 3, 4]
    with mg.override():
        tangent = jvp(f, (q,), (random(*q.shape, seed=3),))[1]
        second = hessian(lambda q: f(q).sin().sum())(q)
    assert not tangent[:, :, 1].any() and not second[:, :, 1].any() and second.isfinite().all()
    expected = jvp(lambda q: reference(q, k, v, mask), (q,), (random(*q.shape, seed=3),))[1]
    torch.testing.assert_close(tangent[:, :, rest], expected[:, :, rest])


@pytest.mark.parametrize("mask", [(L, S), (1, S), (1, 2, L, S), (1, 1, 1, S)], ids=str)
def test_the_mask_has_derivatives_too(mask):
    """PyTorch takes the unfused attention for a mask that requires grad; for one with a tangent it cannot know."""
    q, k, v = inputs("plain")
    m = random(*mask, seed=5)
    t = random(*mask, seed=6)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def fused(m):
        return op(q, k, v, attn_mask=m)[0]

    def expected(m):
        return reference(q, k, v, m)

    with mg.override():
        found = jvp(lambda m: F.scaled_dot_product_attention(q, k, v, m), (m,), (t,))[1]
        torch.testing.assert_close(found, jvp(expected, (m,), (t,))[1])
        x = m.clone().requires_grad_()
        (g,) = torch.autograd.grad(fused(x).sin().sum(), x, create_graph=True)
        second = torch.autograd.grad((g * t).sum(), x)[0]
    torch.testing.assert_close(g, jacrev(lambda m: expected(m).sin().sum())(m))
    torch.testing.assert_close(second, jvp(jacrev(lambda m: expected(m).sin().sum()), (m,), (t,))[1])


def test_dropout_goes_another_way():
    """With a fixed seed it is a function, which PyTorch makes of other operators and differentiates in every mode."""
    q, k, v = inputs("plain")

    def f(q):
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    step, t = 1e-5, random(*q.shape, seed=3)
    with mg.override():
        tangent = jvp(f, (q,), (t,))[1]
        second = jvp(lambda q: jvp(f, (q,), (t,))[1], (q,), (t,))[1]
    torch.testing.assert_close(tangent, (f(q + step * t) - f(q - step * t)) / (2 * step), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(second, (f(q + step * t) - 2 * f(q) + f(q - step * t)) / step**2, rtol=1e-3, atol=1e-4)


def test_modules():
    """A layer of a transformer, fused and unfused."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True).double()
    x, t = random(2, 5, 8), random(2, 5, 8, seed=1)

    def tangent_of_gradient(x):
        return jvp(jacrev(lambda x: layer(x).sin().sum()), (x,), (t,))[1]

    with mg.override():
        found = tangent_of_gradient(x)
        with sdpa_kernel(SDPBackend.MATH):
            expected = tangent_of_gradient(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    q, k, v = inputs("causal")
    f, _ = functions("causal")

    def gradient(q, k, v):
        return torch.autograd.grad(f(q, k, v).sin().sum(), q)[0]

    with mg.override("*"):
        compiled = torch.compile(gradient, backend="aot_eager", dynamic=dynamic)
        x = q.clone().requires_grad_()
        torch.testing.assert_close(compiled(x, k, v), gradient(x, k, v))
