"""Derivatives under our rules against JAX's, with finite differences as the judge. `make jax` runs all of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg

pytest.importorskip("jax", reason="JAX is not installed: pip install 'torch_manualgrad[jax]'")
sys.path.insert(0, str(Path(__file__).parent))

from compare import cases, compare, directions, inputs_of, truth
from functions import FUNCTIONS

CASES = list(cases())


def params():
    """Every fourteenth case is a fast one."""
    for k, (function, dtype) in enumerate(CASES):
        marks = [] if k % 14 == 0 else [pytest.mark.slow]
        yield pytest.param(function, dtype, id=f"{function.name}-{str(dtype)[6:]}", marks=marks)


@pytest.mark.parametrize("function, dtype", params())
@pytest.mark.parametrize("rules", [pytest.param("*", id="all"), pytest.param(None, id="plain")])
def test_ours_is_right_wherever_the_two_differ(function, dtype, rules):
    wrong = [d for d in compare(function, dtype, *([rules] if rules else [])) if d.wrong in ("ours", "both")]
    assert not wrong


def test_a_wrong_derivative_is_found():
    (sine,) = (f for f in FUNCTIONS if f.name == "sin")
    with mg.override(mg.elementwise("aten::sin", lambda self: 1.01 * self.cos(), register=False)):
        found = {d.wrong for d in compare(sine, torch.float64) if d.derivative in ("vjp", "jvp")}
        assert "ours" in found and "JAX" not in found
    twice = dataclasses.replace(sine, jax="lambda x: jnp.sin(x) + (jax.lax.stop_gradient(x) - x)")
    found = {d.wrong for d in compare(twice, torch.float64)}
    assert "JAX" in found and "ours" not in found


def test_finite_differences_settle_at_smooth_points_alone():
    (function,) = (f for f in FUNCTIONS if f.name == "abs")
    inputs = inputs_of(function, torch.float64)
    cotangent, tangents = directions(inputs, 1)[0], directions(inputs, 2)
    found = truth(function, "jvp", inputs, cotangent, tangents, 0)
    kink = inputs[0] == 0
    assert found[kink].isnan().all() and kink.any()
    torch.testing.assert_close(found[~kink], (inputs[0].sign() * tangents[0])[~kink])


def test_there_are_enough_functions():
    assert len(FUNCTIONS) >= 150
