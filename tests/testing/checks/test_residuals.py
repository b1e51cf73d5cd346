"""The check "residuals" is checked: it finds planted faults, and passes what is right beside them."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import engines, function, only
from helpers.tensors import random
from torch import Tensor

NAME = "residuals"


def function_of(forward, backward):
    """An autograd.Function of any arguments."""

    class Planted(torch.autograd.Function):
        pass

    Planted.forward, Planted.backward = staticmethod(forward), staticmethod(backward)
    return Planted.apply


def held_input(ctx, x):
    ctx.x = x
    return x.sin()


def held_output(ctx, x):
    ctx.y = x.exp()
    return ctx.y


def held_index(ctx, x, index):
    ctx.index, ctx.shape = index, x.shape
    return x[index]


HELD = {
    "args[0]": (held_input, lambda ctx, g: g * ctx.x.cos(), (random(3),)),
    "output 0": (held_output, lambda ctx, g: g * ctx.y, (random(3),)),
    "args[1]": (
        held_index,
        lambda ctx, g: (g.new_zeros(ctx.shape).index_add(0, ctx.index, g), None),
        (random(4), torch.tensor([0, 2, 2])),
    ),
}


@pytest.mark.parametrize("where", HELD)
def test_a_write_that_is_not_noticed(where: str) -> None:
    forward, backward, args = HELD[where]
    report = only(NAME, function_of(forward, backward), *args)
    assert engines(report) == {f"write to {where}"}, str(report)
    said = f"an in-place write to {where} between forward and backward silently changes the gradient of args[0]"
    assert said in report.failures[0].detail


def test_a_write_that_is_noticed_or_of_no_effect() -> None:
    for fn in (torch.sin, torch.exp, lambda x: 2 * x, lambda x: x, lambda x: x.expand(2, 3), lambda x: x.chunk(3)):
        assert only(NAME, fn, random(3)).outcome(NAME) == "ok"
    for fn in (function(lambda x: x.sin(), lambda g, x: g * x.cos()), torch.nn.Linear(3, 2).double()):
        assert only(NAME, fn, random(3)).outcome(NAME) == "ok"
    assert only(NAME, lambda x, i: x[i].exp(), random(4), torch.tensor([0, 2, 2])).outcome(NAME) == "ok"


def test_tensors_that_the_function_holds_are_unchanged() -> None:
    held = random(3)
    before = held.clone()
    assert only(NAME, lambda x: (x * held, held), random(3, seed=1)).outcome(NAME) == "ok"
    assert torch.equal(held, before)


def saved(ctx, x):
    ctx.save_for_backward(x, x.cos())
    return x.sin()


WRITES = {
    "backward writes to the cotangent of output 0": lambda ctx, g: g.mul_(ctx.saved_tensors[1]),
    "backward writes to args[0]": lambda ctx, g: g * ctx.saved_tensors[0].data.cos_(),
    "a second backward gives another gradient of args[0]": lambda ctx, g: ctx.saved_tensors[1].data.mul_(g).clone(),
}


@pytest.mark.parametrize("said", WRITES)
def test_a_backward_that_writes(said: str) -> None:
    report = only(NAME, function_of(saved, WRITES[said]), random(3))
    assert any(said in r.detail for r in report.failures), str(report)
    assert only(NAME, function_of(saved, lambda ctx, g: g * ctx.saved_tensors[1]), random(3)).outcome(NAME) == "ok"


def test_a_backward_that_runs_once() -> None:
    def backward(ctx, g):
        cosine, ctx.cosine = ctx.cosine, None
        return g * cosine

    def forward(ctx, x):
        ctx.cosine = x.cos()
        return x.sin()

    assert only(NAME, function_of(forward, backward), random(3)).outcome(NAME) == "raises"


def test_a_function_that_writes_to_its_input() -> None:
    def fn(x: Tensor) -> Tensor:
        x.data.clamp_(min=0)
        return x.exp()

    assert "the function writes to args[0]" in str(only(NAME, fn, random(3)))


def test_an_output_that_shares_memory() -> None:
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy())

    report = only(NAME, function_of(forward, lambda ctx, g: g), random(3))
    assert engines(report) == {"aliases"}
    assert "output 0 shares memory with args[0]" in report.failures[0].detail
    right = function_of(lambda ctx, x: torch.from_numpy(x.detach().numpy().copy()), lambda ctx, g: g)
    assert only(NAME, right, random(3)).outcome(NAME) == "ok"
