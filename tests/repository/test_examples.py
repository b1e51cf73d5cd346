"""The examples run, short, and say what they measured."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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


def test_the_penalty_alone_has_equal_gradients_on_stock(digits):
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


@pytest.fixture(scope="module")
def kabsch():
    path = EXAMPLES / "kabsch.py"
    if not path.exists():
        pytest.skip("not a source tree")
    return runpy.run_path(str(path))


def test_learning_through_the_alignment_of_a_symmetric_molecule(kabsch):
    errors, runs = kabsch["main"](steps=120)
    f32 = torch.float32
    assert all(row["kabsch", f32] < 1e-6 for row in errors.values())
    assert all(math.isnan(row["stock", f32]) for d, row in errors.items() if d < 5e-6)
    assert math.isnan(errors[0.0]["stock", torch.float64])
    assert errors[0.1]["stock", f32] < 1e-5  # far from symmetry it is as good
    assert runs["stock", 0.0].nan_step == 1 and runs["stock", 0.1].nan_step is not None
    for start in (0.0, 0.1):
        assert runs["kabsch", start].nan_step is None and runs["kabsch", start].guest_error < 1e-4


def test_the_reference_gradient_of_the_alignment_example(kabsch):
    """Central differences at the symmetric cage."""
    align, cage, guest = kabsch["by_kabsch"], kabsch["buckminsterfullerene"](), torch.tensor([0.5, 0.3, 0.0]).double()
    observed = kabsch["frames"](64, 0.0, seed=0)
    direction = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    above, below = (kabsch["loss_of"](align, cage + h * direction, guest, *observed) for h in (1e-5, -1e-5))
    gradient = kabsch["cage_gradient"](align, 0.0, torch.float64)
    torch.testing.assert_close((gradient * direction).sum(), (above - below) / 2e-5, rtol=1e-6, atol=1e-8)
    assert cage.shape == (60, 3)
    nearest = torch.cdist(cage, cage).sort(1).values[:, 1:4]  # three neighbours, two in the five-ring
    torch.testing.assert_close(nearest, torch.tensor([1.401, 1.458, 1.458], dtype=torch.float64).expand(60, 3))


def test_whitening_is_noise_in_stock_and_right_in_ours():
    path = EXAMPLES / "whitening.py"
    if not path.exists():
        pytest.skip("not a source tree")
    runs = runpy.run_path(str(path))["main"](steps=11)
    for (dtype, way), run in runs.items():
        bound = 1e-3 if dtype == "float32" else 1e-11
        if way == "stock":
            assert max(run.at_covariance) > 0.1  # several times the gradient itself
        else:
            assert run.first_nan is None and max(run.at_covariance) < bound, (dtype, way)
        assert max(run.at_layer) < bound


def test_attention_on_jagged_and_on_padded_tensors_learns_the_same(capsys):
    path = EXAMPLES / "ragged_attention.py"
    if not path.exists():
        pytest.skip("not a source tree")
    runs = runpy.run_path(str(path))["main"](steps=6, size=12)
    jagged, padded = runs["jagged"], runs["padded"]
    assert len(jagged.losses) == 6 and jagged.losses[-1] < jagged.losses[0] - 0.5
    assert jagged.losses == pytest.approx(padded.losses, abs=1e-4)
    assert sum(jagged.kept) < 0.5 * sum(padded.kept)  # what is kept is as large as the words are many
    assert "largest difference of the losses" in capsys.readouterr().out


def test_a_wave_function_by_the_forward_laplacian(tmp_path, capsys):
    path = EXAMPLES / "hydrogen.py"
    if not path.exists():
        pytest.skip("not a source tree")
    example = runpy.run_path(str(path))
    run = example["main"](steps=20, walkers=64, measurements=20, out=tmp_path)
    assert len(run.energies) == 20 and run.energies[0] > -0.7
    assert -1.18 < run.energy < -0.9 and 0 < run.error < 0.05
    assert run.difference < 1e-10  # from torch.func's
    assert (tmp_path / "hydrogen.png").stat().st_size > 10_000
    assert "energy" in capsys.readouterr().out


def test_local_energies_of_known_states():
    """exp(-r) is hydrogen's ground state, of energy -1/2 wherever the electron is; a sum of -Z_i^2/2 without repulsion."""
    path = EXAMPLES / "hydrogen.py"
    if not path.exists():
        pytest.skip("not a source tree")
    example = runpy.run_path(str(path))
    x = torch.randn(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = lambda x: -2 * x.norm(dim=-1).sum(-1)  # noqa: E731
    repulsion = 1 / (x[:, 0] - x[:, 1]).norm(dim=-1)
    for kinetic in (example["kinetic_forward"], example["kinetic_torch_func"]):
        local = kinetic(exact, x) + example["potential"](example["SYSTEMS"]["He"], x)
        torch.testing.assert_close(local - repulsion, torch.full_like(local, -4.0))
    be = example["WaveFunction"](example["SYSTEMS"]["Be"]).double()
    y = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(be(y[:, [1, 0, 2, 3]]), be(y))  # antisymmetric: the logarithm of its size stays
    gradient = torch.func.grad(lambda x: example["kinetic_forward"](be, x).sum())
    assert gradient(y).isfinite().all()


def test_a_network_solves_equations_by_series_and_by_reverse_mode(tmp_path, capsys):
    path = EXAMPLES / "pinn.py"
    if not path.exists():
        pytest.skip("not a source tree")
    runs, cost = runpy.run_path(str(path))["main"](steps=12, batch=32, out=tmp_path)
    for name in ("Poisson", "Kuramoto-Sivashinsky"):
        series, reverse = runs[name, "series"], runs[name, "reverse"]
        assert series.losses == pytest.approx(reverse.losses, rel=1e-6)  # the same operator, so the same training
        assert series.losses[-1] < series.losses[0]
    assert cost["Kuramoto-Sivashinsky", "series"].bytes < 0.5 * cost["Kuramoto-Sivashinsky", "reverse"].bytes
    assert (tmp_path / "pinn.png").stat().st_size > 10_000
    assert "error of u" in capsys.readouterr().out


def test_whitening_in_two_processes_has_the_gradient_of_one():
    path = EXAMPLES / "distributed_whitening.py"
    if not path.exists():
        pytest.skip("not a source tree")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, "--steps", "30"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in done.stdout.splitlines()[-2:]}
    assert sorted(rows) == ["cholesky", "eigh"]
    for difference, first, last in rows.values():
        assert difference < 1e-12 and last < first - 0.1


def test_an_equilibrium_network_learns_digits(capsys):
    path = EXAMPLES / "equilibrium.py"
    if not path.exists():
        pytest.skip("not a source tree")
    run = runpy.run_path(str(path))["main"](steps=30)
    assert run.losses[-1] < 0.3 * run.losses[0] and run.accuracy > 0.8
    assert run.unrolled_bytes > 20 * run.implicit_bytes
    assert "accuracy" in capsys.readouterr().out


def test_implicit_steps_of_the_brusselator(capsys):
    pytest.importorskip("scipy")
    path = EXAMPLES / "brusselator.py"
    if not path.exists():
        pytest.skip("not a source tree")
    run = runpy.run_path(str(path))["main"](steps=3, size=16)
    assert run.residual < 1e-10 and 3 <= run.iterations <= 30
    assert "colors" in capsys.readouterr().out
