"""The check "leaks" is checked: it finds planted faults, and passes what is right beside them."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import engines, function, only
from helpers.tensors import random
from torch import Tensor

NAME = "leaks"


def exponential(attribute: bool):
    """exp, whose output is an attribute of ctx or saved."""

    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            if attribute:
                ctx.y = y
            return y

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    return Exponential.apply


def test_an_output_that_is_an_attribute_of_ctx() -> None:
    gaps = {"rev/func": "no setup_context", "fwd": "no jvp"}
    report = only(NAME, exponential(attribute=True), random(3), gaps=gaps)
    assert engines(report) == {"after backward", "forward only"}
    assert all("by a reference cycle" in r.detail and "output 0" in r.detail for r in report.failures), str(report)
    assert only(NAME, exponential(attribute=False), random(3), gaps=gaps).outcome(NAME) == "ok"


@pytest.mark.parametrize("fault", [False, True])
def test_tensors_in_a_list(fault: bool) -> None:
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        if fault:
            kept.append(x)
        return x.sin()

    report = only(NAME, fn, random(3))
    everywhere = {"after backward", "forward only", "forward mode", "func.grad", "func.jvp"}
    assert engines(report) == (everywhere if fault else set())
    assert not fault or report.failures[0].detail.endswith("is dropped: argument 0")


def test_a_tangent_that_is_kept() -> None:
    kept: list[Tensor] = []
    wrong = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: kept.append(t) or t * x.cos())
    report = only(NAME, wrong, random(3))
    assert engines(report) == {"forward mode", "func.jvp"}
    assert all("kept alive" in r.detail and "tangent 0" in r.detail for r in report.failures)
    right = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * x.cos())
    assert only(NAME, right, random(3)).outcome(NAME) == "ok"


def test_tensors_that_the_function_owns_may_live() -> None:
    held, caches = random(3), {}

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        caches.setdefault("ones", torch.ones(3))
        return x * held, held, caches["ones"]

    assert only(NAME, fn, random(3)).outcome(NAME) == "ok"
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    assert only(NAME, module, random(4, 3)).outcome(NAME) == "ok"
