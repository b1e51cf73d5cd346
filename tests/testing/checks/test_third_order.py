"""Third derivatives: a fault that begins at third order is found, and the right function beside it passes."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import COMPLEX, columns, function
from helpers.tensors import random
from torch import Tensor

from torch_manualgrad.testing import TOLERANCES, check
from torch_manualgrad.testing.checks.third_order import NESTINGS

SECOND = ("rev", "fwd", "rev-rev", "fwd-rev", "fwd-fwd", "rev-fwd")


def third(fn, *args, modes=(), **options):
    return check(fn, [args], modes=modes, checks=("third order",), raise_on_failure=False, diagnose=False, **options)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (torch.sin, (random(3),)),
        (lambda x, y: (x @ y).exp().sum(-1), (random(2, 3), random(3, 2, seed=1))),
        (torch.exp, (random(3, dtype=COMPLEX),)),
        (torch.tanh, (random(3).float(),)),
        (torch.tanh, (random(3).bfloat16(),)),
        (lambda x: 2 * x, (random(3),)),
    ],
)
def test_a_right_function_passes_in_every_nesting(fn, args) -> None:
    report = third(fn, *args)
    assert not report.failures, str(report)
    assert {r.engine for r in report.results if r.engine.endswith("func")} == {f"{n}, func" for n in NESTINGS}
    eager = {r.engine for r in report.results if r.engine.endswith("eager")}
    assert eager == {f"{n}, eager" for n in ("rev-rev-rev", "fwd-rev-rev", "rev-fwd-rev", "rev-rev-fwd")}


def cosine(second):
    """The vjp of sin, right to second order: `second` is the derivative of cos along a tangent."""
    cos = function(lambda x: x.cos(), lambda g, x: second(g, x))
    return function(lambda x: x.sin(), lambda g, x: g * cos(x))


def test_a_derivative_that_is_frozen_from_third_order_on() -> None:
    report = third(cosine(lambda g, x: -g * x.sin().detach()), random(3), modes=("rev", "rev-rev"))
    assert columns(report) == {"third order"}
    wrong = {r.engine for r in report.failures if r.outcome == "wrong"}
    assert {"rev-rev-rev, eager", "rev-rev-rev, func", "fwd-rev-rev, eager"} <= wrong | raising(report)
    assert {"rev-rev-rev, eager", "rev-rev-rev, func"} <= wrong
    right = third(cosine(lambda g, x: -g * x.sin()), random(3), modes=("rev", "rev-rev"))
    assert {"rev-rev-rev, eager", "rev-rev-rev, func"} & {r.engine for r in right.failures} == set()


def raising(report) -> set[str]:
    return {r.engine for r in report.failures if r.outcome == "raises"}


def test_a_function_whose_nested_jvp_drops_a_term() -> None:
    """autograd.Function switches forward mode off inside its jvp: stock, not planted."""
    report = third(function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp()), random(3))
    wrong = {r.engine.split(",")[0] for r in report.failures}
    assert wrong == {"fwd-fwd-fwd", "fwd-fwd-rev", "fwd-rev-fwd", "rev-fwd-fwd"}


def test_a_cube_without_a_cubic_term_in_one_nesting() -> None:
    """Of x**3 + (x - x.detach())**3 values and two derivatives are those of x**3."""

    def spurious(x: Tensor) -> Tensor:
        return x**3 + (x - x.detach()) ** 3

    report = third(spurious, random(3), modes=SECOND)
    assert columns(report) == {"third order"}
    assert all(r.outcome == "wrong" for r in report.failures)
    assert not third(lambda x: x**3, random(3), modes=SECOND).failures


def test_an_error_is_told() -> None:
    fn = cosine(lambda g, x: (_ for _ in ()).throw(NotImplementedError("the second derivative of sin")))
    report = third(fn, random(3))
    assert "rev-rev-rev, eager" in raising(report)
    assert "the second derivative of sin" in str(report)


def test_where_differences_do_not_settle_the_nestings_judge_each_other() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert not third(torch.relu, zero).failures
    exp = function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp())
    report = third(lambda x: x.relu() + exp(x), zero)
    wrong = {r.engine.split(",")[0] for r in report.failures}
    assert wrong == {"fwd-fwd-fwd", "fwd-fwd-rev", "fwd-rev-fwd", "rev-fwd-fwd"}
    assert all("finite differences do not converge" in r.detail for r in report.failures)
    sided = function(lambda x: x.relu(), lambda g, x: g * (x > 0))
    outcomes = {r.engine: r.outcome for r in third(sided, zero, gaps={"fwd": "no jvp"}).results}
    assert outcomes == {"rev-rev-rev, eager": "ok", "rev-rev-rev, func": "ok"}


@pytest.mark.parametrize("fault", [False, True])
def test_where_only_differences_of_the_second_derivative_settle(fault: bool) -> None:
    """Between many jumps, steps must be small, and third differences divide by their cube."""
    exp = function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp()) if fault else torch.exp
    report = third(lambda x: exp(x) + (1e4 * x).floor().remainder(2), random(3), modes=("rev",))
    dropped = {"fwd-fwd-fwd", "fwd-fwd-rev", "fwd-rev-fwd", "rev-fwd-fwd"}
    assert {r.engine.split(",")[0] for r in report.failures} == (dropped if fault else set())
    assert all(not r.detail for r in report.results)


def test_a_second_derivative_that_is_right_at_the_sample_only() -> None:
    """The references are values, which need no derivative."""
    x = random(3)

    def fn(y: Tensor) -> Tensor:
        there = torch.equal(y.detach(), x)
        return y**3 if there else (y**3).detach() + (y - y.detach()) * 0

    assert not third(fn, x).failures


def test_nestings_of_a_declared_gap_are_left_out() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos())
    report = third(fn, random(3), gaps={"fwd": "no jvp"})
    assert {r.engine for r in report.results} == {"rev-rev-rev, eager", "rev-rev-rev, func"}
    gaps = {f"third order/{nesting}": "no jvp" for nesting in NESTINGS if "fwd" in nesting}
    outcomes = {r.engine.split(",")[0]: r.outcome for r in third(fn, random(3), gaps=gaps).results}
    assert outcomes == {nesting: "gap" if "fwd" in nesting else "ok" for nesting in NESTINGS}


def test_tolerances_grow_with_the_order() -> None:
    for tolerance in TOLERANCES.values():
        for first, second, third_order in zip(tolerance.first, tolerance.second, tolerance.third, strict=True):
            assert third_order / second == pytest.approx(second / first)
