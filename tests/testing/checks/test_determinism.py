"""The check "determinism" is checked: it finds planted faults, and passes what is right beside them."""

from __future__ import annotations

import threading
import time
from random import uniform

import pytest
import torch
import torch.nn.functional as nnf
from helpers.planted import engines, function, only
from helpers.tensors import random
from torch import Tensor

NAME = "determinism"


def test_right_functions_repeat() -> None:
    for fn in (torch.sin, torch.argmax, torch.linalg.svdvals, torch.inverse, torch.cumsum, nnf.dropout):
        args = (random(3, 3), 0) if fn is torch.cumsum else (random(3, 3),)
        assert only(NAME, fn, *args).outcome(NAME) == "ok"


def test_random_numbers_of_another_generator() -> None:
    assert "repeats" in engines(only(NAME, lambda x: x * uniform(0, 1), random(3)))
    assert only(NAME, lambda x: x * torch.rand(()), random(3)).outcome(NAME) == "ok"


def test_a_backward_that_draws_numbers() -> None:
    report = only(NAME, function(lambda x: x.sin(), lambda g, x: g * x.cos() * torch.rand(3)), random(3))
    assert "repeats" in engines(report) and "gradient of args[0]" in str(report.failures[0])


@pytest.mark.parametrize("fault", [False, True])
def test_memory_that_is_not_written(fault: bool) -> None:
    def backward(g: Tensor, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result[fault:] = (g * x.cos())[fault:]
        return result

    report = only(NAME, function(lambda x: x.sin(), backward), random(3))
    assert ("uninitialized memory" in engines(report)) == fault
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("fault", [False, True])
def test_a_workspace_that_threads_share(fault: bool) -> None:
    shared = threading.local() if not fault else type("Shared", (), {})()

    def fn(x: Tensor) -> Tensor:
        shared.total = torch.zeros(())
        for element in x:
            time.sleep(2e-4)
            shared.total = shared.total + element.exp()
        return shared.total

    assert engines(only(NAME, fn, random(4))) == ({"threads"} if fault else set())
