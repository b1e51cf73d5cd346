"""The operators on nested tensors, each kind and each derivative, against a loop over the components with dense torch.

PyTorch's own nested tensors are measured under override, with PyTorch's own calls. docs/nested_operators.md is the same
table, next to PyTorch without an override.
"""

import sys
import warnings
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.nested.operators import LIMITS

TOOLS = Path(__file__).parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("not a source tree", allow_module_level=True)
sys.path.append(str(TOOLS))  # at the end: a tool has the name of a package
from nested_cases import CASES, Case  # noqa: E402
from nested_probe import KINDS, MEASURES, measure  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_override():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    with mg.override("nested"):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_right_or_declared(case, kind):
    for what in MEASURES:
        outcome, why = measure(case, kind, what)
        declared = case.declared(kind, what)
        assert outcome == ("raises" if declared else "right"), (what, why, declared)


def test_declared_gaps():
    """Nothing for Ragged and nothing in forward and backward, but where no component has an answer; no stale limit."""
    used = {(kind, what) for case in CASES for kind in KINDS for what in (*MEASURES, case.limit)}
    assert {*LIMITS} - used == {("strided", "complex")}  # test_nested_override.py proves it
    for case in CASES:
        for kind in KINDS:
            for what in MEASURES:
                if not case.limit and (kind == "Ragged" or what in ("forward", "backward", "second order")):
                    assert not case.declared(kind, what)
    assert sum(bool(case.limit) for case in CASES) == 2
    assert not any(case.declared("jagged", "jvp") for case in CASES if not case.limit)


def test_the_probe_tells_wrong_from_right():
    """A derivative that is off by a factor, a value that is, and a tangent that is lost."""
    (sum_of,) = [c for c in CASES if c.name == "sum, ragged dim"]

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

        @staticmethod
        def jvp(ctx, tangent):
            return tangent / 2

    def changed(by):
        return Case("changed", lambda n, x: by(n.sum(x, 1)), sum_of.reference, sum_of.shapes)

    for kind in KINDS:
        assert measure(changed(Half.apply), kind, "forward") == ("right", "")
        assert measure(changed(Half.apply), kind, "backward")[0] == "wrong"
        assert measure(changed(Half.apply), kind, "second order")[0] == "wrong"
        assert measure(changed(lambda y: y + 1e-6), kind, "forward")[0] == "wrong"
        assert measure(changed(lambda y: y[:-1]), kind, "forward")[0] == "wrong"
    for kind in ("Ragged", "jagged"):
        assert measure(changed(lambda y: y.detach()), kind, "jvp")[0] == "wrong"
        assert measure(changed(Half.apply), kind, "jvp")[0] == "wrong"
