"""The check "built inputs": tensors that are themselves results of a forward-mode computation, and views of such."""

from __future__ import annotations

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.testing import check
from torch_manualgrad.testing.checks.built_inputs import BUILDS

A = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + 1


class Square(torch.autograd.Function):
    """Its jvp takes the tangent for one whose memory is contiguous."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 2 * x * tangent.view(-1).view(x.shape)


def test_a_jvp_that_needs_a_contiguous_tangent_is_found():
    options = {"raise_on_failure": False, "diagnose": False}
    found = check(Square.apply, [(A,)], modes=("fwd",), checks=("built inputs",), **options)
    assert found.outcome("fwd") == "ok" and found.outcome("built inputs") == "raises"
    assert all("transpose" in failure.engine for failure in found.failures)


@pytest.mark.parametrize(
    "function",
    [torch.view_as_real, torch.real, torch.imag, torch.abs, torch.angle, torch.linalg.vector_norm, torch.fft.fft],
    ids=lambda f: f.__name__,
)
def test_views_and_norms_of_complex_numbers(function):
    with mg.override():
        check(function, [(torch.complex(A, A.flip(0)),)], modes=(), checks=("built inputs",))


def test_layouts_that_a_function_does_not_take_are_left_out():
    def needs_contiguous(x):
        torch._assert(x.is_contiguous(), "expected a contiguous tensor")
        return x.sin()

    found = check(needs_contiguous, [(A,)], modes=("rev", "fwd"), checks=("built inputs",))
    engines = {result.engine for result in found.results if result.check == "built inputs"}
    assert engines == {"eager, base + t u", "func, base + t u"}
    check(lambda x: x.as_strided((3,), (2,)).sin(), [(A,)], modes=("rev", "fwd"), checks=("built inputs",))


def test_only_modes_that_are_checked_and_right():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad  # never called

    found = check(Reverse.apply, [(A,)], modes=("rev-fwd",), checks=("built inputs",), raise_on_failure=False)
    assert found.outcome("rev-fwd") == "raises" and found.outcome("built inputs") == "-"
    both = check(torch.sin, [(A,), (A,), (A,)], checks=("built inputs",))
    engines = {result.engine for result in both.results if result.check == "built inputs"}
    assert engines == {f"{way}, {name}" for way in ("eager", "func", "fwd-fwd", "rev-fwd") for name in BUILDS}


def test_it_is_a_default():
    assert "built inputs" in mg.testing.CHECKS
