"""Random programs: a part of them runs here, and each kind of planted fault is caught."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.rule import rule
from torch_manualgrad.forward_ad.jets.linear import primal_of
from torch_manualgrad.forward_ad.jets.table import known

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("not a source tree", allow_module_level=True)
sys.path.append(str(TOOLS))  # at the end: a tool has the name of a package

from fuzz import judge, pool  # noqa: E402
from fuzz.generate import generate  # noqa: E402
from fuzz.run import run  # noqa: E402
from fuzz.truth import Sampled, weights  # noqa: E402

SEED, PROGRAMS, PARTS = 2026, 200, 8


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("part", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(PARTS)])
def test_programs_of_a_fixed_seed(part):
    tally = run(SEED, range(part, PROGRAMS, PARTS), shrinking=3.0)
    assert not tally.findings, "\n".join(f.text for f in tally.findings)
    assert tally.programs == PROGRAMS // PARTS
    assert tally.verdicts[judge.OK] > 0.7 * sum(tally.verdicts.values()), tally.verdicts


def test_a_seed_and_a_number_give_one_program():
    assert generate(3, 8).script == generate(3, 8).script
    assert generate(3, 8).script != generate(4, 8).script


def test_every_entry_of_the_pool_is_in_some_program():
    names = pool.names()
    missed = [n for i, n in enumerate(_in_turn(names)) if n not in generate(SEED, i).operators]
    # an entry that no value fits in one program is in the next that wants it
    again = [n for n in missed if not any(n in generate(seed, i).operators for seed, i in _wanting(n, names))]
    assert not again


def _in_turn(names, seed=SEED):
    from random import Random

    names = list(names)
    Random(seed).shuffle(names)
    return names


def _wanting(name, names):
    return [(seed, _in_turn(names, seed).index(name)) for seed in range(8)]


# -- planted faults ------------------------------------------------------------------------------------------------------

SMALL = [
    "aten::cosh",
    "aten::index_put",
    "function: sum",
    "function: square",
    "join: mul",
    "view: reshape",
    "view: flatten",
]


def hyperbolic(vjp, jvp):
    return rule("aten::cosh", vjp={"self": vjp}, jvp={"result": jvp}, register=False)


def right(grad, self):
    return grad * self.sinh()


def tangent(self_p, self_t):
    return self_t * self_p.sinh()


def kept_gradient():
    """What was written over keeps its gradient."""
    return rule(
        "aten::index_put",
        vjp={
            "self": lambda grad: grad,
            "values": lambda grad, indices, values: grad[tuple(indices)].sum_to_size(values.shape),
        },
        register=False,
    )


@contextmanager
def dropped_series():
    own = known.aten__cosh
    known.aten__cosh = lambda space, x: torch.cosh(primal_of(space, x))
    try:
        yield
    finally:
        known.aten__cosh = own


PLANTED = {
    "a wrong factor in a vjp": (
        lambda: mg.override(hyperbolic(lambda grad, self: 1.01 * right(grad, self), tangent)),
        "aten::cosh",
    ),
    "a zero tangent": (lambda: mg.override(hyperbolic(right, lambda self_t: torch.zeros_like(self_t))), "aten::cosh"),
    "a frozen residual": (
        lambda: mg.override(hyperbolic(lambda grad, self: right(grad, self.detach()), tangent)),
        "aten::cosh",
    ),
    "a dropped series": (dropped_series, "aten::cosh"),
    "a wrong write to a view": (lambda: mg.override(kept_gradient()), "write: index_put_"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_caught(kind):
    around, entry = PLANTED[kind]
    options = dict(entries=[*SMALL, entry], wanted=[entry], configurations=["mg.override()"])
    found = None
    for number in range(12):
        tally = run(5, [number], around=around, shrinking=2.0, **options)
        found = found or next(iter(tally.findings), None)
        if found:
            assert not run(5, [number], **options).findings
            break
    assert found is not None
    assert found.verdict.outcome == judge.WRONG
    assert len(found.program.lines) <= 3 and entry in found.program.operators
    assert compile(found.text, "finding", "exec")


# -- the truth -----------------------------------------------------------------------------------------------------------


def test_weights_are_exact_for_polynomials():
    points = tuple(range(-6, 7))
    for order in range(1, 5):
        for power in range(13):
            value = sum(w * float(p) ** power for w, p in zip(weights(points, order), points))
            expected = torch.prod(torch.arange(1.0, order + 1)).item() if power == order else 0.0
            assert value == pytest.approx(expected, abs=1e-4)


def test_differences_know_their_error():
    import math

    smooth = Sampled(lambda t: math.exp(math.sin(3 * t)), 2e-16)
    found = smooth.derivatives(1e-7)
    assert [n.value for n in found[1:4]] == pytest.approx([3.0, 9.0, 0.0], abs=1e-5)
    assert all(abs(n.value - e) <= 10 * n.error for n, e in zip(found[1:], (3.0, 9.0, 0.0, -243.0)))
    assert all(smooth.is_smooth(k, found[k], 0.1) for k in (1, 2, 3))


@pytest.mark.parametrize("kink", [abs, lambda t: max(t, 0.0), lambda t: t * abs(t), lambda t: round(t + 0.5)])
def test_a_kink_accuses_nobody(kink):
    f = Sampled(kink, 2e-16)
    found = f.derivatives(1e-7)
    assert not all(f.is_smooth(k, found[k], 0.1) for k in (1, 2, 3))


def test_a_pole_between_the_points_accuses_nobody():
    """The points around it lie on a smooth function; the value at 0 does not."""
    import math

    f = Sampled(lambda t: 1e-3 / (t + 1.47e-5) ** 2 + math.sin(t), 2e-16)
    found = f.derivatives(1e-7)
    assert all(n.error > 1e-4 * abs(n.value) for n in found[1:])


def test_the_command_prints_its_seed_and_what_was_reached(monkeypatch, capsys):
    from fuzz.__main__ import main

    monkeypatch.setattr(sys, "argv", ["fuzz", "--programs", "2", "--unreached"])
    threads = torch.get_num_threads()
    try:
        main()
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.startswith("seed ") and "2 programs in" in printed
    assert f"of {len(pool.names())} entries of the pool" in printed
    assert "never in a program: aten::_standard_gamma" in printed
