"""The examples run, short, and say what they measured."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


@pytest.fixture(scope="module")
def digits():
    path = EXAMPLES / "digits_gradient_penalty.py"
    if not path.exists():
        pytest.skip("not a source tree")
    return runpy.run_path(str(path))


@pytest.fixture(scope="module")
def measured(digits, tmp_path_factory):
    out, threads = tmp_path_factory.mktemp("digits"), torch.get_num_threads()
    torch.set_num_threads(1)
    yield digits["main"](steps=40, out=out), out
    torch.set_num_threads(threads)


def test_stock_is_nan_after_one_step_and_override_trains(measured):
    found, _ = measured
    stock, override = found["penalized"]["stock"], found["penalized"]["override"]
    assert stock.first_norm == override.first_norm == 0.0
    assert stock.losses[0] == override.losses[0]  # derivatives only: the values are the same to the bit
    assert stock.nan_step == 1 and stock.nan_weights == ["filters.weight"] and math.isnan(stock.losses[1])
    assert override.nan_step is None and override.losses[-1] < 0.5 * override.losses[0]
    assert override.accuracy > 0.7


def test_without_the_penalty_both_are_the_same(measured):
    found, _ = measured
    stock, override = found["plain"].values()
    assert found["difference"] < 1e-4
    assert stock.accuracy == pytest.approx(override.accuracy, abs=0.01)
    assert stock.nan_step is override.nan_step is None and stock.accuracy > 0.7


def test_the_plot_is_written(measured):
    _, out = measured
    assert (out / "digits_gradient_penalty.png").stat().st_size > 10_000


def test_what_the_example_says_of_the_penalty_alone(digits):
    """The norm in the penalty is differentiated once: at an input gradient of zero, stock is as good."""
    images, labels = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    torch.nn.init.zeros_(model[2].weight)
    gradients = []
    for derivatives in digits["DERIVATIVES"].values():
        with derivatives():
            norms = digits["input_gradient_norm"](model, images, labels)
            assert norms.eq(0).all()
            model.zero_grad()
            ((norms - 1) ** 2).mean().backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(g.eq(0).all() for run in gradients for g in run)


def test_the_second_derivative_at_zero():
    def second():
        x = torch.zeros(3, requires_grad=True)
        (first,) = torch.autograd.grad(torch.linalg.vector_norm(x), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert second().isnan().all()
    with mg.override():
        assert second().eq(0).all()


def test_the_command_line_of_the_example(digits, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits_gradient_penalty.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "digits_gradient_penalty.py"), run_name="__main__")
    assert "--steps" in capsys.readouterr().out
