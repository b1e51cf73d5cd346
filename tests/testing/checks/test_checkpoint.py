"""The checks "checkpoint" and "compiled autograd" are checked: they find planted faults, and pass what is right."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from helpers.planted import COMPLEX, engines, function, only
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg

NAME = "checkpoint"


def test_right_functions_under_checkpoint() -> None:
    held = random(3)
    for fn, x in {
        torch.sin: random(3),
        torch.linalg.det: random(3, 3),
        (lambda x: nnf.dropout(x.exp(), 0.5)): random(8),
        (lambda x: (x.sin(), x.argmax())): random(3),
        (lambda x: torch.ones_like(x)): random(3),
        (lambda x: (x * held, held)): random(3),
        (lambda z: z.abs() * z): random(3, dtype=COMPLEX),
    }.items():
        assert only(NAME, fn, x).outcome(NAME) == "ok"
    assert not held.requires_grad


def test_a_function_that_asks_whether_a_gradient_is_wanted() -> None:
    report = only(NAME, lambda x: x.sin() if torch.is_grad_enabled() else x.cos(), random(3))
    assert engines(report) == {"use_reentrant=True"}


def test_a_function_that_remembers_its_calls() -> None:
    """Where backward calls it again, it returns what it has."""
    seen: dict[int, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        key = x.data_ptr()
        if key not in seen:
            seen.clear()
            seen[key] = x.sin()
        return seen[key].exp()

    assert {"use_reentrant=False"} <= engines(only(NAME, fn, random(3)))


def table(by_address: bool):
    """x -> sin x, whose backward finds cos x by the address of what is saved, or has saved it."""
    cosines: dict[int, Tensor] = {}

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            cosines[x.data_ptr()] = x.cos()
            ctx.save_for_backward(x, x.cos())
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            x, cosine = ctx.saved_tensors
            return g * (cosines.get(x.data_ptr(), torch.ones_like(x)) if by_address else cosine)

    return Sine.apply


def test_a_backward_that_relies_on_an_address() -> None:
    # a copy may come to lie at an address that has just become free: then there is nothing to be found
    assert any(engines(only(NAME, table(by_address=True), random(3))) >= {"hooks that copy"} for _ in range(5))
    assert only(NAME, table(by_address=False), random(3)).outcome(NAME) == "ok"


def test_rrelu_under_checkpoint() -> None:
    """PyTorch saves the noise before it is drawn: hooks, and with them a checkpoint, see memory that is not written."""
    with mg.override("aten::rrelu_with_noise"):
        assert only(NAME, lambda x: nnf.rrelu(x, training=True), random(8)).outcome(NAME) == "ok"


def test_a_backward_that_is_another_in_the_compiler() -> None:
    name = "compiled autograd"
    wrong = function(lambda x: x.sin(), lambda g, x: g * x.cos() * (2 if torch.compiler.is_compiling() else 1))
    report = only(name, wrong, random(3))
    assert [r.outcome for r in report.failures] == ["wrong"] and "gradient of args[0]" in str(report)
    assert only(name, function(lambda x: x.sin(), lambda g, x: g * x.cos()), random(3)).outcome(name) == "ok"
