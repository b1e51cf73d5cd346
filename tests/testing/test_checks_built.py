"""The check "built inputs": tensors that are themselves results of a forward-mode computation, and views of such."""

from __future__ import annotations

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.testing import check

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
    options = {
        "raise_on_failure": False,
        "diagnose": False,
        "gaps": {"fwd-fwd": "PyTorch keeps no tangent of saved tensors"},
    }
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("rule", mg.rules.values(), ids=lambda rule: rule.name)
def test_every_rule(rule, dtype):
    with mg.override(rule):
        samples = list(rule.samples(dtype, "cpu"))
        if samples:
            check(rule.probe, samples, modes=(), checks=("built inputs",), gaps=rule.gaps, name=rule.name)
