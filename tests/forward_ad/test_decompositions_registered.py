"""Decompositions of one's own: registered or for a while, listed, undone, through every way of forward mode."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.ops import define
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import hessian, jacfwd, jacrev, jvp, linearize, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.override.compiled_calls import in_python

forward_ad = mg.forward_ad
OP = "decomposition_tests::wave"
X = torch.linspace(-1.1, 1.3, 4, dtype=torch.float64)
T = torch.linspace(0.7, -0.4, 4, dtype=torch.float64)


@torch.library.custom_op(OP, mutates_args=())
def wave(x: Tensor, y: Tensor | None = None, *, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    return (x * scale).sin(), x.cos() if y is None else x * y


@wave.register_fake
def _(x, y=None, *, scale=2.0):
    return torch.empty_like(x), torch.empty_like(x)


def setup_context(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.scale = keyword_only_inputs["scale"]


def backward(ctx, of_sin, of_cos):
    x, y = ctx.saved_tensors
    of_x = of_sin * (x * ctx.scale).cos() * ctx.scale + of_cos * (-x.sin() if y is None else y)
    return of_x, None if y is None else of_cos * x


wave.register_autograd(backward, setup_context=setup_context)


def decomposed(x, y, *, scale):
    return (x * scale).sin(), x.cos() if y is None else x * y


def loss(x):
    a, b = wave(x, scale=3.0)
    c, d = wave(b, a.sin())
    return (a * b).sum() * (c * d).sum()


def plain(x):
    a, b = decomposed(x, None, scale=3.0)
    c, d = decomposed(b, a.sin(), scale=2.0)
    return (a * b).sum() * (c * d).sum()


def dual_numbers(f):
    def tangent(x):
        with fwAD.dual_level():
            return fwAD.unpack_dual(f(fwAD.make_dual(x, T))).tangent

    return tangent


def eager_forward_over_reverse(f):
    def product(x):
        x = x.clone().requires_grad_()
        with fwAD.dual_level():
            x = fwAD.make_dual(x, T)
            return fwAD.unpack_dual(torch.autograd.grad(f(x), x)[0]).tangent

    return product


def eager_reverse_over_forward(f):
    def product(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(dual_numbers(f)(x), x)[0]

    return product


WAYS = {
    "dual numbers": dual_numbers,
    "jvp": lambda f: lambda x: jvp(f, (x,), (T,)),
    "jacfwd": jacfwd,
    "hessian": hessian,
    "linearize": lambda f: lambda x: linearize(f, x)[1](T),
    "eager forward over reverse": eager_forward_over_reverse,
    "eager reverse over forward": eager_reverse_over_forward,
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "vmap of jvp": lambda f: vmap(lambda t: jvp(f, (X,), (t,))[1]),
    "jvp of vmap": lambda f: lambda x: jvp(lambda x: vmap(f)(torch.stack([x, 2 * x])), (x,), (T,)),
    "third order": lambda f: jacfwd(jacrev(jacfwd(f))),
}
GIVEN = {
    "decomposition": lambda: forward_ad.decompositions({wave: decomposed}),
    "transposition": lambda: forward_ad.enable(wave),
}


def right(way):
    argument = torch.stack([X, T]) if way == "vmap of jvp" else X
    torch.testing.assert_close(WAYS[way](loss)(argument), WAYS[way](plain)(argument))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", GIVEN)
def test_every_way_of_forward_mode(given, way):
    with GIVEN[given]() as scope:
        assert [(one.name, one.how) for one in scope.forward_modes] == [(OP, given)]
        right(way)


@pytest.mark.parametrize("way", ["jvp", "jacfwd", "hessian"])
@pytest.mark.parametrize("given", GIVEN)
def test_inside_a_compiled_function(given, way):
    torch.compiler.reset()
    with GIVEN[given]():
        compiled = torch.compile(WAYS[way](loss), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(X), WAYS[way](plain)(X))


def factor() -> float:
    """By how much the tangent differs from the right one; 0 is PyTorch's, which drops it."""
    ratio = jvp(lambda x: wave(x)[0], (X,), (T,))[1] / (T * (2 * X).cos() * 2)
    torch.testing.assert_close(ratio, ratio[:1].expand(4))
    return round(ratio[0].item(), 6)


def times(n):
    return lambda x, y, *, scale: (n * (x * scale).sin(), x.clone())


TWICE, THRICE = times(2), times(3)


def test_scopes_nest_and_end_in_any_order():
    assert factor() == 0
    with forward_ad.decompositions({OP: TWICE}):
        assert factor() == 2
        with forward_ad.decompositions({OP: THRICE}):
            assert factor() == 3
        assert factor() == 2
    first, second = forward_ad.decompositions({OP: TWICE}), forward_ad.decompositions({OP: THRICE})
    first.remove()
    assert factor() == 3
    second.remove()
    second.remove()
    assert factor() == 0
    with pytest.raises(ZeroDivisionError), forward_ad.decompositions({OP: TWICE}) as scope:
        raise ZeroDivisionError
    assert factor() == 0
    with pytest.raises(RuntimeError, match="was removed"), scope:
        pass


def test_reverse_mode_and_calls_without_tangents_stay():
    def wrong(*args, **kwargs):
        raise AssertionError

    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(loss(x), x)[0]
    with forward_ad.decompositions({OP: wrong}), in_python():
        torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], expected)
        with torch.no_grad():
            wave(x)
        with fwAD.dual_level():
            torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], expected)
        with pytest.raises(AssertionError):
            jvp(loss, (X,), (T,))


def test_registered_listed_and_taken_back():
    @forward_ad.register_decomposition(wave)
    def mine(x, y, *, scale):
        return decomposed(x, y, scale=scale)

    try:
        assert factor() == 1
        entry = forward_ad.decomposition_table[OP]
        assert entry.function is mine and entry.is_active and OP in list(forward_ad.decomposition_table)
        assert [(a.why, a.acting.name) for a in mg.active()] == [("forward mode by decomposition", OP)]
        with pytest.raises(ValueError, match="exists already"):
            forward_ad.register_decomposition(OP)(mine)
        with forward_ad.decompositions({OP: TWICE}):
            assert factor() == 2
        with forward_ad.enable() as scope:
            assert [one.how for one in scope.forward_modes if one.name == OP] == ["decomposition"]
    finally:
        forward_ad.unregister_decomposition(OP)
    assert factor() == 0 and not mg.active() and OP not in forward_ad.decomposition_table
    with pytest.raises(KeyError, match="no decomposition"):
        forward_ad.unregister_decomposition(OP)
    with pytest.raises(ValueError, match="part of torch_manualgrad"):
        forward_ad.unregister_decomposition("aten::trace")
    with pytest.raises(ValueError, match="exists already"):
        forward_ad.register_decomposition("aten::trace")(mine)


def test_an_operator_with_a_formula_is_left_alone_unless_asked():
    def sine(self):
        return 2 * torch.ops.aten.tanh(self)

    def tangent():
        return jvp(torch.sin, (X,), (T,))[1]

    expected = tangent()
    with forward_ad.decompositions({"aten::sin": sine}) as scope:
        assert not scope.forward_modes
        torch.testing.assert_close(tangent(), expected)
    with forward_ad.decompositions({torch.ops.aten.sin: sine}, replace=True):
        torch.testing.assert_close(tangent(), 2 * T * (1 - X.tanh() ** 2))
        with mg.override("aten::sin"):  # a rule goes before
            torch.testing.assert_close(tangent(), expected)
    forward_ad.register_decomposition("aten::sin")(sine)
    try:
        assert not forward_ad.decomposition_table["aten::sin"].is_active
        torch.testing.assert_close(tangent(), expected)
    finally:
        forward_ad.unregister_decomposition("aten::sin")


def test_functions_that_cannot_be_decomposed():
    ours = define("(Tensor x) -> Tensor", lambda x: x.sin())
    for op, message in (
        ("aten::sin_", "writes to an argument"),
        ("aten::t", "returns a view"),
        ("aten::reshape", "returns a view|composite"),
        ("aten::layer_norm", "composite"),
        ("aten::nothing_of_that_name", "no such operator"),
        (ours, "impl_jvp"),
    ):
        with pytest.raises(ValueError, match=message):
            forward_ad.register_decomposition(op)
    with pytest.raises(TypeError, match="expected an operator"):
        forward_ad.register_decomposition(torch.sin)
    with pytest.raises(TypeError, match="must be a function"):
        forward_ad.decompositions({OP: 3})
    with pytest.raises(KeyError, match="no decomposition 'aten::tan'"):
        forward_ad.decompositions("aten::tan")
    with pytest.raises(ValueError, match="unknown way 'magic'"):
        forward_ad.enable(wave, by=("magic",))
    with forward_ad.decompositions({OP: lambda x, y, *, scale: x}), pytest.raises(RuntimeError, match="tuple of 2"):
        jvp(loss, (X,), (T,))


def test_each_set_has_its_own_graph():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: jvp(lambda x: wave(x)[0], (x,), (T,))[1], backend=counter)
    forward_ad.decompositions({OP: TWICE}).remove()  # graphs that are older than the guard are dropped, once
    seen = []
    for _ in range(2):
        seen.append(compiled(X).abs().sum().item())
        for function in (TWICE, THRICE):
            with forward_ad.decompositions({OP: function}):
                seen.append(compiled(X).abs().sum().item())
    assert seen[0] == 0 and seen[2] == pytest.approx(1.5 * seen[1]) and seen[:3] == seen[3:]
    assert counter.frame_count == 3

    @torch.compile(backend="eager", fullgraph=True)
    def inside(x):
        with forward_ad.decompositions({OP: TWICE}):
            return x + 1

    with pytest.raises(RuntimeError):
        inside(X)


def test_it_acts_on_every_thread():
    found = []
    with forward_ad.decompositions({OP: TWICE}):
        thread = threading.Thread(target=lambda: found.append(factor()))
        thread.start()
        thread.join()
    assert found == [2]


def test_autocast_does_not_reach_inside():
    def squared(x, y, *, scale):
        return (x.reshape(2, 2) @ x.reshape(2, 2)).reshape(4), x.clone()

    x, t = X.float(), T.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert (x.reshape(2, 2) @ x.reshape(2, 2)).dtype is torch.bfloat16
    with forward_ad.decompositions({OP: squared}), torch.autocast("cpu", torch.bfloat16), fwAD.dual_level():
        for part in fwAD.unpack_dual(wave(fwAD.make_dual(x, t))[0]):
            assert part.dtype is torch.float32
