"""The checks "meta" and "make_fx" are checked: they find planted faults, and pass what is right beside them."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import engines, only
from helpers.tensors import random
from torch import Tensor


def operator(name: str, fake, backward_fake=torch.mul):
    """sin as a custom operator, whose backward is another one, with their fake kernels; None for no fake kernel."""

    @torch.library.custom_op(f"planted_tracing::{name}", mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    @torch.library.custom_op(f"planted_tracing::{name}_backward", mutates_args=())
    def sine_backward(g: Tensor, x: Tensor) -> Tensor:
        return g * x.cos()

    if fake is not None:
        sine.register_fake(fake)
    sine_backward.register_fake(backward_fake)
    sine.register_autograd(
        lambda ctx, g: sine_backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return sine


def test_right_fake_kernels() -> None:
    sine = operator("right", torch.empty_like)
    for name in ("meta", "make_fx"):
        assert only(name, sine, random(3, 4)).outcome(name) == "ok"
        assert only(name, lambda x: sine(x).exp(), random(3, 4).mT).outcome(name) == "ok"


FAULTS = {
    "shape": lambda x: x.new_empty(x.shape[0]),
    "dtype": lambda x: torch.empty_like(x, dtype=torch.float32),
    "strides": lambda x: x.new_empty(x.shape[::-1]).mT,
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fake_kernel_of_other(what: str) -> None:
    report = only("meta", operator(f"other_{what}", FAULTS[what]), random(3, 4))
    found = next(r for r in report.failures if r.engine == "outputs on meta")
    assert found.outcome == "wrong" and f"output 0: {what}" in found.detail


def test_a_fake_kernel_of_the_backward() -> None:
    report = only(
        "meta", operator("backward_strides", torch.empty_like, lambda g, x: FAULTS["strides"](x)), random(3, 4)
    )
    assert [(r.engine, r.outcome) for r in report.failures] == [("gradients of fakes", "wrong")]
    assert "gradient of args[0]: strides" in report.failures[0].detail


def test_a_users_operator_without_a_fake_kernel() -> None:
    assert only("meta", operator("missing", None), random(3)).outcome("meta") == "raises"


def test_an_operator_of_pytorchs_that_depends_on_values_is_not_accused() -> None:
    for fn in (lambda x: x[x.nonzero()[:, 0]], lambda x: x * x.max().item()):
        assert only("meta", fn, random(3)).outcome("meta") == "-"


def test_tensors_of_the_functions_own_are_not_accused() -> None:
    held = random(4, 3)
    assert not only("meta", lambda x: torch.atan2(x, held), random(4, 3)).failures
    for module in (torch.nn.Linear(3, 2), torch.nn.LSTM(3, 2), torch.nn.BatchNorm1d(3)):
        assert only("meta", module.double(), random(4, 3)).outcome("meta") == "ok"


def largest(x: Tensor) -> float:
    """Read from memory, which neither fake tensors nor tracers notice."""
    return float(x.detach().numpy().max())


def test_numbers_of_the_sample_in_the_graph() -> None:
    burnt = next(r for r in only("make_fx", lambda x: x * largest(x), random(3)).failures if r.engine == "real")
    assert burnt.outcome == "wrong" and "output 0 at a neighbour of the sample" in burnt.detail
    assert only("make_fx", lambda x: x * x.max(), random(3)).outcome("make_fx") == "ok"


def test_numbers_of_the_sample_in_the_graph_of_the_backward() -> None:
    class Burning(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.number = largest(x)
            return x * x.max()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.number

    burnt = next(r for r in only("make_fx", Burning.apply, random(3)).failures if r.engine == "real")
    assert "gradient of args[0] at a neighbour" in burnt.detail


def test_a_tracer_that_refuses_is_not_an_error_of_the_function() -> None:
    for fn in (lambda x: x * x.max().item(), lambda x: x if x.sum() > 0 else 2 * x, torch.nn.Dropout()):
        assert only("make_fx", fn, random(3)).outcome("make_fx") == "-"


def test_another_function_while_it_is_traced() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() if torch.fx.experimental.proxy_tensor.get_proxy_mode() is None else x.cos()

    assert engines(only("make_fx", fn, random(3))) == {"real", "symbolic"}
