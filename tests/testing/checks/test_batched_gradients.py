"""The check "batched gradients" is checked: it finds planted faults, and passes what is right beside them."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import COMPLEX, engines, function, only
from helpers.tensors import random
from torch import Tensor

NAME = "batched gradients"


def product(fault: bool):
    """t cos x, which may add up over its calls."""
    before: list[Tensor] = []

    def compute(t: Tensor, x: Tensor) -> Tensor:
        before.append(t * x.cos())
        return sum(before) if fault else before[-1]

    return compute


@pytest.mark.parametrize("fault", [False, True])
def test_a_backward_that_adds_up(fault: bool) -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.product = product(fault)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return ctx.product(g, *ctx.saved_tensors)

    report = only(NAME, Sine.apply, random(3), gaps={"fwd": "no jvp"})
    assert engines(report) == ({"is_grads_batched", "reverse jacobian"} if fault else set()), str(report)
    assert not fault or "gradient of args[0]" in str(report.failures[0])


@pytest.mark.parametrize("fault", [False, True])
def test_a_jvp_that_adds_up(fault: bool) -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), product(fault))
    assert engines(only(NAME, fn, random(3))) == ({"forward jacobian"} if fault else set())


def test_a_backward_that_vmap_cannot_run() -> None:
    def through_numpy(g: Tensor, x: Tensor) -> Tensor:
        return torch.from_numpy(g.numpy() * x.cos().numpy())

    report = only(NAME, function(lambda x: x.sin(), through_numpy), random(3), gaps={"fwd": "no jvp"})
    assert report.outcome(NAME) == "raises"


def test_a_backward_that_writes_a_batch_to_memory_of_one() -> None:
    def in_place(g: Tensor, x: Tensor) -> Tensor:
        return torch.zeros(3, dtype=x.dtype).add_(g * x.cos())

    report = only(NAME, function(lambda x: x.sin(), in_place), random(3), gaps={"fwd": "no jvp"})
    assert {r.outcome for r in report.failures} == {"raises"}


RIGHT = {
    "several outputs": (lambda x: (x.sin(), {"sum": x.exp().sum()}, x.argmax()), random(4)),
    "complex": (lambda z: z.abs().square() * z, random(3, dtype=COMPLEX)),
    "float32": (torch.tanh, random(3).float()),
    "infinite output": (lambda x: torch.stack([x.sin(), torch.full_like(x, torch.inf)]), random(3)),
    "constant": (lambda x: torch.ones_like(x), random(3)),
    "dropout": (lambda x: torch.nn.functional.dropout(x.exp(), 0.5), random(8)),
    "a matrix": (torch.linalg.det, random(3, 3)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_has_batched_gradients(name: str) -> None:
    fn, x = RIGHT[name]
    assert only(NAME, fn, x).outcome(NAME) == "ok"


def test_the_number_of_calls_does_not_depend_on_the_size() -> None:
    def calls(size: int) -> int:
        count = []
        only(NAME, lambda x: count.append(1) or x.sin(), random(size))
        return len(count)

    assert calls(2) == calls(200)
