"""Ten training steps under DDP, fully_shard, tensor parallel and pipeline schedules: the losses are those of one process."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_runs import FAST, FORMS, MIXED, RUNS, WORLDS
from helpers.processes import once, run_program

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="gloo on Linux")
ENGINES = [run for run in RUNS if run[0] > 1]

Losses = Callable[[int, str, str], list[float]]


def marked(runs: list[tuple[int, str, str]]) -> list:
    """DDP under every form, any other engine under one override and under another rule; the rest is slow."""
    return [pytest.param(*run, marks=[] if run in FAST else pytest.mark.slow) for run in runs]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Of an engine under a form, or of one process; all processes are started once."""

    @functools.cache
    def found(part: str, world: int) -> dict[str, dict[str, list[float]]]:
        program = functools.partial(run_program, Path(__file__).parent / "engine_runs.py", part)
        return json.loads((once(tmp_path_factory, f"engines_{part}", program) / f"{world}.json").read_text())

    def of(world: int, name: str, form: str) -> list[float]:
        return found("fast" if (world, name, form) in FAST else "slow", world)[name][form]

    return of


def alone(losses: Losses, world: int, name: str, form: str) -> list[float]:
    """Of one process that trains the engine's network."""
    _, kind, _ = WORLDS[world][name]
    return losses(1, kind, form)


@pytest.mark.parametrize(("world", "name", "form"), marked([run for run in ENGINES if run[1] != MIXED]))
def test_an_engine_has_the_losses_of_one_process(losses, world, name, form):
    engine = losses(world, name, form)
    assert engine == pytest.approx(alone(losses, world, name, form), rel=1e-11) and engine[-1] < engine[0]


@pytest.mark.parametrize(
    ("world", "name", "form"), marked([run for run in ENGINES if run[2] not in ("stock", "another rule")])
)
def test_an_override_changes_no_loss(losses, world, name, form):
    """PyTorch's own losses are those of one process, as the slow tests show; but for mixed precision."""
    stock = losses(world, name, "stock") if name == MIXED else alone(losses, world, name, "stock")
    assert losses(world, name, form) == pytest.approx(stock, rel=2e-2 if name == MIXED else 1e-11)


@pytest.mark.parametrize(("world", "name"), [run[:2] for run in ENGINES if run[2] == "another rule"])
def test_the_backward_of_every_engine_uses_the_active_rules(losses, world, name):
    """That it agrees with one process under the same rule is tested above."""
    stock, other = alone(losses, world, name, "stock"), losses(world, name, "another rule")
    assert stock[0] == pytest.approx(other[0], rel=1e-11) and abs(stock[-1] - other[-1]) > 1e-4


def test_every_form_of_an_override_is_tried():
    assert {form for world, _, form in FAST if world > 1} == {form for _, _, form in ENGINES} == set(FORMS)
