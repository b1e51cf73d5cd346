"""What PyTorch cannot run, or no difference can show, is not held against a function; a fault beside it still is."""

from __future__ import annotations

import torch
from helpers.planted import FIRST, columns, function, only
from helpers.tensors import random
from torch import Tensor

from torch_manualgrad.testing import Sample, check
from torch_manualgrad.testing.comparison.problem import Problem


def thinned(x: Tensor) -> Tensor:
    """x with some entries dropped, the same ones at each call; the caller's generator stays as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x * torch.rand(x.shape, dtype=torch.float64)


def drawn(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.bernoulli(x.sigmoid()) * x


def test_numbers_drawn_under_a_seed_of_ones_own_are_seen() -> None:
    assert Problem(thinned, Sample(random(3))).random
    assert not Problem(torch.sin, Sample(random(3))).random
    # an operator that could draw, and does not
    assert not Problem(lambda x: torch.native_dropout(x, 0.5, False)[0], Sample(random(3))).random


def test_vmap_of_what_it_cannot_draw() -> None:
    assert not check(drawn, [(random(3),)], modes=FIRST, checks=("vmap", "vmap-grad", "precision")).failures
    wrong = function(drawn, lambda g, x: 2 * g * drawn(x) / x)
    report = check(wrong, [(random(3),)], modes=("rev",), checks=("vmap",), raise_on_failure=False)
    assert columns(report) == {"rev"}


def test_results_in_half_precision() -> None:
    for cast in (lambda x: x.half(), lambda x: x.bfloat16(), lambda x: x.chalf()):
        assert not check(cast, [(random(2),)]).failures
        wrong = function(cast, lambda g, x: 2 * g.real.to(x.dtype))
        assert "rev" in columns(check(wrong, [(random(2),)], modes=("rev",), checks=(), raise_on_failure=False))


def test_fake_tensors_where_shapes_depend_on_values() -> None:
    assert only("fake", lambda x: x[x > 0], random(4)).outcome("fake") == "-"
    assert only("fake", lambda x: x.sin(), random(4)).outcome("fake") == "ok"
