"""The checker is checked: a right function passes all of its checks, gaps and reports say what is so, and it sees through
stock PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nnf
from helpers.interpreters import run_python
from helpers.planted import COMPLEX, DOUBLE, FIRST, columns, function, only
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.testing import ALL_CHECKS, CheckFailed, Sample, check, check_op, composition
from torch_manualgrad.testing.comparison.problem import Problem

# controls: right functions -------------------------------------------------------------------------------------------

CONTROLS = {
    "sin": (torch.sin, [(random(3, 4),), (random(),), (random(0, 3),)]),
    "matmul": (torch.matmul, [(random(3, 4), random(4, 2)), (random(2, 3, 4), random(4)), (random(3), random(3))]),
    "broadcast": (torch.mul, [(random(3, 1), random(1, 4)), (random(), random(2, 2))]),
    "svdvals": (torch.linalg.svdvals, [(random(3, 4),), (random(2, 3, 3),), (random(4, 3, dtype=COMPLEX),)]),
    "complex exp": (torch.exp, [(random(3, dtype=COMPLEX),)]),
    "complex product": (lambda a, b: a.mH @ b, [(random(3, 2, dtype=COMPLEX), random(3, 2, dtype=COMPLEX, seed=1))]),
    "complex to real": (lambda z: z.abs().square(), [(random(4, dtype=COMPLEX),)]),
    "several outputs": (lambda x: (x.sin(), {"sum": x.exp().sum()}, x.argmax()), [(random(4),)]),
    "qr": (torch.linalg.qr, [(random(4, 3),), (random(3, 3, dtype=COMPLEX),)]),
    "integers": (lambda x, i, flag: x[i].square() if flag else x, [(random(5), torch.tensor([0, 2, 2]), True)]),
    "a list": (lambda xs, y: torch.cat(xs) * y, [([random(2), random(3)], random(5))]),
    "keywords": (lambda x, *, weight: x.cos() * weight, [Sample(random(3), weight=random(3, seed=1))]),
    "constant": (lambda x: torch.ones_like(x), [(random(3),)]),
    "no inputs": (lambda i: i + 1, [(torch.arange(3),)]),
    "infinite output": (lambda x: torch.stack([x.sin(), torch.full_like(x, torch.inf)]), [(random(3),)]),
    "dropout": (lambda x: nnf.dropout(x.exp(), 0.5), [(random(8),)]),
    "huge": (lambda x: x.square().sum(), [(random(3) * 1e80,)]),
    "tiny": (lambda x: x * x.sum(), [(random(3) * 1e-80,)]),
    "float32": (torch.tanh, [(random(3).float(),)]),
    "bfloat16": (torch.sin, [(random(3).bfloat16(),)]),
    "strided input": (torch.sin, [(random(4, 6)[::2, 1::2],), (random(4, 3).mT,)]),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_right_function_passes(name: str) -> None:
    fn, samples = CONTROLS[name]
    report = check(fn, samples)
    assert report and not report.failures
    assert len({r.sample for r in report.results}) == len(samples)


def test_a_right_function_compiles() -> None:
    report = check(lambda x, y: (x @ y).tanh(), [(random(3, 2), random(2, 4))], modes=(), checks=ALL_CHECKS)
    assert report.outcome("compile") == "ok"


def test_a_right_operator_passes_opcheck() -> None:
    report = check(torch.ops.aten.linalg_lu.default, [(random(3, 3),)])
    assert report.outcome("opcheck") == "ok"
    assert report.outcome("undefined cotangents") == "ok"


def test_correct_formulas_in_a_function_pass() -> None:
    fn = function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp())
    assert check(fn, [(random(3),)], modes=("rev", "fwd", "rev-rev", "fwd-rev"))


# declared gaps -------------------------------------------------------------------------------------------------------


def test_a_gap_that_raises_passes() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos())
    report = check(fn, [(random(3),)], modes=("rev", "fwd"), checks=("duality",), gaps={"fwd": "no formula yet"})
    assert report.outcome("fwd") == "gap"
    assert "no formula yet" in next(r.detail for r in report.results if r.outcome == "gap")
    assert report.outcome("duality") == "-"


def test_a_gap_that_works_is_reported() -> None:
    report = check(torch.sin, [(random(3),)], modes=("fwd",), checks=(), gaps={"fwd": "old"}, raise_on_failure=False)
    assert {r.outcome for r in report.failures} == {"gap works"}
    assert "declared gap now works" in str(report)


def test_a_gap_that_is_wrong_is_wrong() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    report = check(fn, [(random(3),)], modes=("fwd",), checks=(), gaps={"fwd": "none"}, raise_on_failure=False)
    assert {r.outcome for r in report.failures} == {"wrong"}


def test_a_gap_of_one_engine() -> None:
    class Old(torch.autograd.Function):  # the older style, which torch.func refuses
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    report = check(Old.apply, [(random(3),)], modes=("rev",), checks=(), gaps={"rev/func": "no setup_context"})
    assert {r.engine: r.outcome for r in report.results} == {"eager": "ok", "func": "gap"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown mode"):
        check(torch.sin, [], modes=("backwards",))
    with pytest.raises(ValueError, match="unknown check"):
        check(torch.sin, [], checks=("speed",))
    with pytest.raises(ValueError, match="a gap names"):
        check(torch.sin, [], gaps={"second": "?"})


def test_no_samples_is_an_error() -> None:
    """Nothing is checked then, as of an iterator that a first check has used up."""
    samples = iter([(random(3),)])
    check(torch.sin, samples, modes=("rev",), checks=())
    for none in (samples, []):
        with pytest.raises(ValueError, match="samples: there are none"):
            check(torch.sin, none, raise_on_failure=False)


# reports -------------------------------------------------------------------------------------------------------------


def test_a_failure_names_everything() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: 2 * g * x.cos())
    with pytest.raises(CheckFailed) as caught:
        check(fn, [Sample(random(3)).named("first")], modes=("rev",), checks=(), name="planted")
    text = str(caught.value)
    for part in ("planted", "first (f64[3])", "float64", "rev", "eager", "found", "reference", "relative 1"):
        assert part in text
    assert caught.value.report.failures


def test_random_numbers_are_seen_where_two_draws_are_equal():
    assert Problem(lambda x: nnf.dropout(x, 1e-12), Sample(random(1))).random
    assert not Problem(lambda x: x.exp(), Sample(random(1))).random


def test_check_is_deterministic_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again = (check(CONTROLS["dropout"][0], [(random(8),)], modes=("rev",), checks=()) for _ in range(2))
    assert [r.ours for r in first.results] == [r.ours for r in again.results]
    assert torch.equal(state, torch.get_rng_state())


def test_sample() -> None:
    sample = Sample(random(2, 3), [random(1), 2], p=2).named("pair")
    assert repr(sample) == "pair (f64[2, 3], [f64[1], 2], p=2)"
    with pytest.raises(AttributeError, match="frozen"):
        sample.name = "other"


# the harness sees through stock PyTorch: where one of these fails, PyTorch has been repaired --------------------------


def domain(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x.sqrt()


def test_steps_out_of_the_domain_are_passed_over() -> None:
    assert check(domain, [(torch.tensor([0.02, 3.0], dtype=DOUBLE),)], modes=FIRST, checks=())
    assert check(torch.log, [(torch.tensor([0.02, 3.0], dtype=DOUBLE),)], checks=())


STOCK = {
    "vector_norm squared at zero": (
        lambda x: torch.linalg.vector_norm(x).square(),
        [(torch.zeros(3, dtype=DOUBLE),)],
        "rev-rev",
    ),
    "vector_norm at zero": (torch.linalg.vector_norm, [(torch.zeros(3, dtype=DOUBLE),)], "rev-rev"),
    "det at a zero pivot rev": (torch.linalg.det, [(torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double(),)], "rev"),
    "householder_product rev-fwd": (torch.linalg.householder_product, [(random(3, 2), random(2))], "rev-fwd"),
    "layer_norm fwd-fwd": (lambda x: nnf.layer_norm(x, (4,)), [(random(3, 4),)], "fwd-fwd"),
    "cholesky_inverse fwd-fwd": (
        lambda x: torch.cholesky_inverse(x.tril()),
        [(random(3, 3) + 3 * torch.eye(3, dtype=DOUBLE),)],
        "fwd-fwd",
    ),
    "cumprod at zero fwd-fwd": (
        lambda x: x.cumprod(0),
        [(torch.tensor([1.5, 0.0, 2.0, 0.0], dtype=DOUBLE),)],
        "fwd-fwd",
    ),
    "complex householder_product fwd-fwd": (
        torch.linalg.householder_product,
        [(random(3, 2, dtype=COMPLEX), random(2, dtype=COMPLEX))],
        "fwd-fwd",
    ),
    "scatter_reduce prod fwd": (
        lambda x, s: x.scatter_reduce(0, torch.tensor([0, 0, 1]), s, "prod"),
        [(random(2), random(3))],
        "fwd",
    ),
    "eigh rev-fwd": (
        lambda x: torch.linalg.eigh(x + x.mT)[0].exp().sum() + torch.linalg.eigh(x + x.mT)[1].square().sum(),
        [(random(3, 3),)],
        "rev-fwd",
    ),
}


def test_softmax_of_stock_raises_in_eager_rev_fwd() -> None:
    report = check(lambda x: x.softmax(0), [(random(3),)], modes=("rev-fwd",), checks=(), raise_on_failure=False)
    assert {r.engine: r.outcome for r in report.results} == {"eager": "raises", "func": "ok"}


@pytest.mark.parametrize("name", STOCK)
def test_sees_through_stock(name: str) -> None:
    fn, samples, mode = STOCK[name]
    report = check(
        fn, samples, modes=("rev", "fwd", mode) if mode != "fwd" else FIRST, checks=(), raise_on_failure=False
    )
    assert report.outcome(mode) == "wrong"
    assert mode == "rev" or report.outcome("rev") == ("not differentiable" if name == "vector_norm at zero" else "ok")


def test_operator_database() -> None:
    report = check_op("aten::linalg_lu", limit=3, checks=("duality", "undefined cotangents"))
    assert report
    report = check_op(
        "linalg.householder_product", limit=3, modes=("rev", "fwd", "fwd-fwd"), checks=(), raise_on_failure=False
    )
    assert columns(report) == {"fwd-fwd"}
    with pytest.raises(KeyError):
        check_op("no_such_operator")


def test_plugin(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_right(derivative_check):\n    derivative_check(torch.sin, [(torch.ones(2).double(),)])\n"
        "def test_wrong(derivative_check):\n    derivative_check(lambda x: x * x.detach(), [(torch.ones(2).double(),)])\n"
        "def test_other():\n    pass\n"
    )
    # without the entry point, which may or may not be installed here
    command = ["-m", "pytest", "-q", "-m", "derivatives", "-p", "torch_manualgrad_pytest", "--strict-markers"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = run_python(*command, "test_it.py", folder=tmp_path, environment=environment)
    assert "1 failed, 1 passed, 1 deselected" in found.stdout, found.stdout + found.stderr


def test_the_plugin_does_not_import_torch(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "torch_manualgrad_pytest", "test_it.py"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in found.stdout, found.stdout + found.stderr


def test_the_plugin_is_declared() -> None:
    project = Path(__file__).parents[3] / "pyproject.toml"
    if not project.exists():
        pytest.skip("not a source tree")
    declared = project.read_text()
    assert 'torch_manualgrad_pytest = "torch_manualgrad_pytest"' in declared
    assert 'py-modules = ["torch_manualgrad_cli", "torch_manualgrad_pytest"]' in declared


# composition ---------------------------------------------------------------------------------------------------------


def test_composition_of_a_right_function() -> None:
    table = composition(lambda x: x.square().sum().sqrt(), lambda x: (x * x).sum() ** 0.5, (random(4),))
    assert not table.failures, str(table)
    names = [row.name for row in table]
    assert len(names) == len(set(names)) > 35
    assert str(table).startswith("| through")


def test_steps_that_span_many_periods_of_an_angle_are_not_believed():
    # the imaginary part of the result is an angle: far steps see its jumps, and no slope
    x = torch.tensor(1231834.172088464 + 1078753.8613502707j, dtype=torch.complex128)
    report = check(lambda x: torch.complex(x.real, x.imag.sin().atan2(x.imag.cos())), [Sample(x)], checks=())
    assert {r.outcome for r in report.results} == {"ok"}


def test_composition_finds_a_planted_fault() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    table = composition(fn, torch.sin, (random(4),), compile=False)
    outcomes = {row.name: row.outcome for row in table}
    for name in ("eager dual numbers", "func.jvp", "func.jacfwd", "vmap of jvp", "fwd-fwd"):
        assert outcomes[name] == "wrong", str(table)
    for name in ("forward", "eager reverse", "func.grad", "func.vjp", "rev-rev", "vmap of grad"):
        assert outcomes[name] == "ok", str(table)


# what PyTorch cannot run, or no difference can show, is not held against a function; a fault beside it is ------------


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


# check of a rule: under its own override, with its own samples and gaps -----------------------------------------------

SAMPLE = mg.Sample(torch.tensor([0.5, 2.0], dtype=torch.float64))
FEW = {"modes": ("rev", "fwd-rev"), "checks": ()}


def sine(factor, **about):
    about = {"register": False} | about
    return mg.rule("aten::sin", vjp={"self": lambda grad, self: factor * grad * self.cos()}, **about)


def test_a_wrong_rule_fails_outside_of_an_override():
    with pytest.raises(CheckFailed, match=r"aten::sin.*rev"):
        check(sine(2), [SAMPLE], **FEW)
    assert check(sine(1), [SAMPLE], **FEW).ok and not mg.active()


def test_its_own_override_comes_last():
    with mg.override(sine(2)):
        assert check(sine(1), [SAMPLE], **FEW).ok
        assert not check(torch.sin, [SAMPLE], **FEW, raise_on_failure=False).ok


def test_its_own_samples():
    report = check(mg.rules["aten::cumprod"], **FEW)
    assert report.ok and {r.dtype for r in report.results} == {"float64", "complex128"}
    assert all("aten::cumprod" in str(r) for r in report.results)


def test_its_gaps():
    def vjp(grad, self):
        raise NotImplementedError("never")

    rule = mg.rule("aten::sin", vjp={"self": vjp}, gaps={"rev": "no vjp", "fwd-rev": "no vjp"}, register=False)
    assert check(rule, [SAMPLE], **FEW).ok
    with pytest.raises(CheckFailed):
        check(rule, [SAMPLE], modes=("rev", "fwd"), checks=())


def test_samples_are_needed_for_anything_else():
    with pytest.raises(TypeError, match="for a rule only"):
        check(torch.sin)
