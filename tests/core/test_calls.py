"""Calls that csrc/calls serves: which these are, and that values, gradients and graphs are as if Python had served them."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.calls import NORM, is_pytorchs, made, needs_library, norm, vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.rule import rule

# -- which calls, and their gradients ---------------------------------------------------------------------------------


pytestmark = needs_library


def test_a_plain_call_needs_no_python():
    x = vector()
    with mg.override(NORM):
        y, forward = made(lambda: norm(x))
        (g,), backward = made(lambda: torch.autograd.grad(y, x))
    assert forward == (1, 0, 0) and backward == (0, 1, 0)
    assert y.grad_fn.name() == "LinalgVectorNormBackward0" and not is_pytorchs(y.grad_fn)
    torch.testing.assert_close(g, x.detach() / y.detach())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: norm(x, 3),
        lambda x: norm(x, 2.5, [0], True),
        lambda x: x.norm(),
        lambda x: torch.norm(x, p=1),
        lambda x: torch.ops.aten.norm.Scalar(x, 3),
        lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, None, [0]),
        lambda x: norm(x.to(torch.complex128) * 1j),
        lambda x: norm(x, dtype=torch.float64),
    ],
)
def test_it_is_the_same_gradient(call):
    x = vector()
    with mg.override("norm", "linalg.vector_norm"):
        (g,), count = made(lambda: torch.autograd.grad(call(x).sum(), x))
        with compiled_calls.in_python():
            (expected,), none = made(lambda: torch.autograd.grad(call(x).sum(), x))
    assert count == (1, 1, 0) and none == (0, 0, 0)
    assert torch.equal(g, expected)


def test_the_formula_is_left_to_python_where_precisions_differ():
    x = vector().detach().float().requires_grad_()
    with mg.override(NORM):
        (g,), count = made(lambda: torch.autograd.grad(norm(x, dtype=torch.float64), x))
    assert count == (1, 0, 1) and g.dtype == torch.float32


def test_no_gradient_is_stock():
    x = vector()
    with mg.override(NORM):
        y, count = made(lambda: norm(x.detach()))
        with torch.no_grad():
            z, none = made(lambda: norm(x))
    assert count == none == (0, 0, 0) and y.grad_fn is None and not z.requires_grad
    assert torch.equal(y, norm(x.detach()))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_calls_that_are_not_plain_enter_python():
    x, t = vector(), vector(1).detach()
    with mg.override(NORM):
        with forward_ad.dual_level():
            (_, tangent), count = made(lambda: forward_ad.unpack_dual(norm(forward_ad.make_dual(x, t))))
            assert count[0] == 0 and tangent is not None
        seen = Seen()
        with seen:
            y, count = made(lambda: norm(x))
            assert count == (0, 0, 0) and NORM in seen.names and not is_pytorchs(y.grad_fn)
        assert made(lambda: norm(x.to_sparse().coalesce().values()))[1][0] == 1
    product = {"self": lambda grad, other: grad * other, "other": lambda grad, self: grad * self}
    with mg.override(rule("aten::mul.Tensor", vjp=product, register=False)):
        assert made(lambda: x * 2)[1] == made(lambda: x * x)[1] == (1, 0, 0)


NUMBERS = {
    "mul": lambda x, number: number * x,
    "div": lambda x, number: x / number,
    "rdiv": lambda x, number: number / x,
    "where": lambda x, number: torch.where(x.real > 0, x, number),
    "xlogy": lambda x, number: torch.xlogy(x, abs(number)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_promote_in_the_derivative_as_in_the_value(name):
    """PyTorch's gradients, in value and dtype, of first and second order; the same with calls left to Python."""

    def derivatives(x, number):
        y = NUMBERS[name](x, number)
        (g,) = torch.autograd.grad(y, x, torch.full_like(y, 1 / 3), create_graph=True)
        again = torch.autograd.grad(g, x, torch.ones_like(g))[0] if g.requires_grad else None
        return y, g, again

    for dtype in (torch.float16, torch.float32, torch.float64, torch.complex64):
        for size in ((), (3,)):
            x = (torch.arange(1.0, 4.0) if size else torch.tensor(1.5)).to(dtype).requires_grad_()
            for number in (True, 2, 0.7, 1.5 + 0.5j):
                if name == "xlogy" and (dtype.is_complex or type(number) in (bool, complex)):
                    continue
                if dtype is torch.float16 and type(number) is complex:
                    continue  # PyTorch has little of complex halves
                want = derivatives(x, number)
                with mg.override("*"):
                    found, count = made(lambda x=x, number=number: derivatives(x, number))
                    with compiled_calls.in_python():
                        general = derivatives(x, number)
                assert count[0] > 0
                for a, b, c in zip(want, found, general):
                    assert a is b is c is None or a.dtype == b.dtype == c.dtype
                    torch.testing.assert_close(b, a)
                    torch.testing.assert_close(c, a)
                if name == "mul" and size:  # what is rounded where PyTorch rounds it
                    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


def test_a_mode_around_the_backward_alone():
    x = vector()
    with mg.override(NORM):
        y = norm(x)
        with Seen() as seen:
            (g,), count = made(lambda: torch.autograd.grad(y, x))
    assert count == (0, 0, 1) and "manualgrad::norm_backward" in seen.names
    torch.testing.assert_close(g, x.detach() / y.detach())


# -- the graph --------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_those_of_the_vjp():
    x = vector()
    with mg.override(NORM):
        (g,), count = made(lambda: torch.autograd.grad(norm(x), x, create_graph=True))
        assert count == (1, 0, 1)
        assert torch.autograd.gradgradcheck(norm, (x,)) and torch.autograd.gradcheck(norm, (x,))
        torch.autograd.grad(g.sum(), x)


def test_batched_gradients():
    x, cotangents = vector(), torch.eye(3, dtype=torch.float64)
    with mg.override(NORM):
        y = norm(torch.stack([x, 2 * x, 3 * x]), dim=1)
        (g,), count = made(lambda: torch.autograd.grad(y, x, cotangents, is_grads_batched=True))
    assert count == (0, 0, 1)
    torch.testing.assert_close(g[2], 3 * x.detach() / x.detach().norm())


def test_a_change_in_place_is_seen():
    x = vector()
    with mg.override(NORM):
        doubled = x * 2
        y = norm(doubled)
        doubled.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        z = norm(x * 2)
        z.mul_(2)  # the output is kept too
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_a_second_backward():
    x = vector()
    with mg.override(NORM):
        y = norm(x)
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() / y.detach())


def test_hooks():
    x, seen = vector(), []
    with mg.override(NORM):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append("pack") or t.clone(), lambda t: t * 1):
            y = norm(x)
        y.grad_fn.register_hook(lambda inputs, outputs: seen.append((len(inputs), len(outputs))))
        y.grad_fn.register_prehook(lambda grads: tuple(g * 3 for g in grads))
        (g,) = torch.autograd.grad(y, x)
    assert seen == ["pack", "pack", (1, 1)]
    torch.testing.assert_close(g, 3 * x.detach() / y.detach())


def test_only_tensors_that_a_gradient_reads_are_saved():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        with mg.override("aten::linalg_solve_triangular"):
            A, B = torch.eye(3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
            for a, b in ((A, B.clone().requires_grad_()), (A.clone().requires_grad_(), B)):
                _, count = made(lambda: torch.linalg.solve_triangular(a, b, upper=True))
                assert count == (1, 0, 0)
                with compiled_calls.in_python():
                    torch.linalg.solve_triangular(a, b, upper=True)
                assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]
                kept.clear()


def test_missing_cotangents_of_several_outputs():
    A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)).requires_grad_()
    with mg.override("linalg.qr", "linalg.lu_factor_ex"):
        Q, R = torch.linalg.qr(A)
        (g,) = torch.autograd.grad(R.sum(), A, retain_graph=True)
        assert g.shape == A.shape and Q.grad_fn is R.grad_fn
        LU, pivots, info = torch.linalg.lu_factor_ex(A)
        assert LU.requires_grad and not pivots.requires_grad and not info.requires_grad
        (g,) = torch.autograd.grad(LU.sum(), A)
    torch.testing.assert_close(g.diagonal().sum(), torch.tensor(3.0, dtype=torch.float64))


def test_an_undefined_cotangent_is_as_in_python():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    def gradient():
        x = vector()
        Nothing.apply(norm(x)).backward()
        return x.grad

    with mg.override(NORM):
        found = gradient()
        with compiled_calls.in_python():
            expected = gradient()
    assert (found is None) == (expected is None) and (found is None or torch.equal(found, expected))


def test_checkpoint_and_anomaly_mode():
    x = vector()
    with mg.override(NORM), torch.autograd.detect_anomaly(check_nan=True):
        (g,) = torch.autograd.grad(checkpoint(lambda x: norm(x * 2), x, use_reentrant=False), x)
        bad = vector().detach().fill_(float("nan")).requires_grad_()
        with pytest.raises(RuntimeError, match="LinalgVectorNormBackward.*nan"):
            norm(bad, 3).backward()
    torch.testing.assert_close(g, 2 * x.detach() / x.detach().norm())


def test_autocast():
    x = vector().detach().float().requires_grad_()
    with mg.override(NORM), torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
        (g,), count = made(lambda: torch.autograd.grad(y, x))
    assert count == (0, 0, 1) and g.dtype == torch.float32


def test_an_error_in_a_vjp_keeps_its_type():
    def fails(grad, self):
        raise ZeroDivisionError("planted")

    made_rule = rule("aten::sin", vjp={"self": fails}, register=False)
    x = vector()
    with mg.override(made_rule):
        y, count = made(lambda: torch.sin(x))
        with pytest.raises(ZeroDivisionError, match="planted"):
            y.sum().backward()
    assert count == (1, 0, 0)


def test_compiled_autograd():
    def gradients():
        x = vector()
        (norm(x) * torch.linalg.det(x[:4].reshape(2, 2))).backward()
        return x.grad

    expected = gradients()
    with mg.override("*"):
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            for _ in range(2):
                torch.testing.assert_close(gradients(), expected)


# -- rules that come and go -------------------------------------------------------------------------------------------


def test_the_innermost_rule_is_active():
    x = vector()

    def scaled(factor):
        return rule("aten::sin", vjp={"self": lambda grad, self: grad * factor}, register=False)

    def gradient():
        return torch.autograd.grad(torch.sin(x).sum(), x)[0][0].item()

    with mg.override(scaled(2)):
        assert gradient() == 2
        y = torch.sin(x)
        with mg.override(scaled(3)):
            assert gradient() == 3
            with mg.override(NORM):
                assert gradient() == 3
        assert gradient() == 2
    assert is_pytorchs(torch.sin(x).grad_fn)
    assert torch.autograd.grad(y.sum(), x)[0][0] == 2  # a tensor keeps the backward that it was made with
    mg.unregister()
    assert is_pytorchs(torch.sin(x).grad_fn)
    with mg.override(scaled(4)):
        assert gradient() == 4


def test_stock_inside():
    from torch_manualgrad.core.override.kernels import without_overrides

    x = vector()
    with mg.override(NORM):
        with without_overrides():
            assert is_pytorchs(norm(x).grad_fn)
        assert not is_pytorchs(norm(x).grad_fn)


def test_threads_that_call_while_rules_come_and_go():
    x, stop, errors = vector(), threading.Event(), []
    expected = torch.autograd.grad(norm(x), x)[0]

    def work():
        try:
            while not stop.is_set():
                torch.testing.assert_close(torch.autograd.grad(norm(x), x)[0], expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(200):
        with mg.override(NORM), mg.override() if i % 2 else contextlib.nullcontext():
            norm(x)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_one_graph_on_several_threads():
    x = vector()
    with mg.override(NORM):
        y = norm(x)
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(torch.autograd.grad(y, x, retain_graph=True)[0]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8 and all(torch.equal(g, found[0]) for g in found)


def test_nothing_is_kept_alive():
    import gc
    import weakref

    with mg.override(NORM):
        x = vector() * 2
        y = norm(x)
        left = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
    assert not any(reference() is not None for reference in left)
