"""The check of compiled functions: right ones pass in every mode, and planted faults of the compiler are found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.planted import only
from helpers.tensors import random
from torch import Tensor, nn

import torch_manualgrad as mg
from torch_manualgrad.compiling import calls, graphs
from torch_manualgrad.compiling.function import Compiled
from torch_manualgrad.testing import Report, check
from torch_manualgrad.testing.checks.third_order import NESTINGS


def compiled(fn, *args, **options) -> Report:
    return only("compiled", fn, *args, **options)


def failed(report: Report) -> set[str]:
    return {r.engine.removesuffix(", again") for r in report.failures}


RIGHT = {
    "two arguments": (lambda x, y: (x @ y).tanh(), (random(3, 2), random(2, 4))),
    "several outputs": (lambda x: (x.sin(), {"sum": x.exp().sum()}, x.argmax()), (random(4),)),
    "views only": (lambda x: (x.t(), x), (random(3, 2),)),
    "random numbers": (lambda x: F.dropout(x.exp(), 0.5), (random(8),)),
    "an operator": (torch.ops.aten.tanh.default, (random(3),)),
    "a module": (nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), (random(2, 3),)),
    "complex numbers": (torch.exp, (random(3, dtype=torch.complex128),)),
    "single precision": (torch.tanh, (random(3).float(),)),
}


SLOW = ("two arguments", "a module", "random numbers", "complex numbers", "single precision")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RIGHT])
def test_a_right_function_passes_in_every_mode(name: str) -> None:
    fn, args = RIGHT[name]
    report = compiled(fn, *args)
    assert not report.failures, str(report)
    labels = {r.engine for r in report.results}
    assert {"aot_eager", "forward", "rev, eager", "fwd, func", "rev-rev, eager, again", "fwd-fwd, func"} < labels
    assert "write to output 0" in labels


def test_only_the_modes_that_are_asked_for() -> None:
    report = check(torch.sin, [(random(3),)], modes=("rev",), checks=("compiled",))
    labels = {r.engine for r in report.results if r.check == "compiled"}
    elsewhere = {"forward, elsewhere", "rev, eager, elsewhere"}
    assert labels == {"aot_eager", "forward", "rev, eager", "rev, func", "write to output 0"} | elsewhere


@pytest.mark.slow
def test_third_derivatives_if_they_are_checked() -> None:
    report = check(torch.sin, [(random(3),)], modes=(), checks=("third order", "compiled"))
    labels = {r.engine for r in report.results if r.check == "compiled"}
    assert {f"{nesting}, func" for nesting in NESTINGS} < labels


@pytest.mark.slow
def test_graphs_compiled_by_inductor() -> None:
    report = check(torch.sin, [(random(3),)], modes=("rev", "rev-rev"), checks=("compiled",), lowering="inductor")
    assert report.outcome("compiled") == "ok"


def test_a_function_that_is_not_compiled_is_reported_and_can_be_a_gap() -> None:
    class Own(torch.autograd.Function):
        forward = staticmethod(lambda x: 2 * x)
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: 2 * g)
        jvp = staticmethod(lambda ctx, t: 2 * t)

    report = compiled(Own.apply, random(3))
    assert "Own.apply has derivatives of its own" in str(report)
    assert {r.outcome for r in report.failures} == {"raises"}

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    assert failed(compiled(broken, random(3))) == {"aot_eager", "forward"}
    assert not compiled(broken, random(3), gaps={"compiled": "a graph break"}).failures


def test_a_backward_that_is_compiled_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = graphs.joint

    def doubled(*args):
        found = joint(*args)
        if found is not None:
            graph = found.backward.graph
            with graph.inserting_before(graph.output_node()):
                made = [
                    graph.call_function(torch.ops.aten.mul.Tensor, (n, 2)) for n in graphs.outputs_of(found.backward)
                ]
            for new, old in zip(made, graphs.outputs_of(found.backward)):
                new.meta = dict(old.meta)
            graphs.set_outputs(found.backward, made)
        return found

    monkeypatch.setattr(graphs, "joint", doubled)
    report = compiled(lambda x: x.tanh(), random(3))
    assert {"rev, eager", "rev, func", "rev-rev, eager", "rev-fwd, func"} <= failed(report)
    assert not {"forward", "fwd, eager", "aot_eager"} & failed(report)
    (first, *_) = report.failures
    assert first.sample == repr(mg.Sample(random(3))) and "gradient of args[0]" in str(first)


def test_a_tangent_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed_forward = graphs.pushed_forward

    def dropped(*args):
        graph, _ = pushed_forward(*args)
        graphs.set_outputs(graph, [])
        return graph, ()

    monkeypatch.setattr(graphs, "pushed_forward", dropped)
    report = compiled(lambda x: x.tanh(), random(3))
    assert failed(report) >= {"fwd, eager", "fwd, func", "fwd-rev, eager"}
    assert not {"rev, eager", "rev-rev, eager"} & failed(report)


def test_a_residual_that_is_written_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(x: Tensor) -> Tensor:
        return x.exp()[0]

    monkeypatch.setattr(calls, "note_function", lambda function: False)  # Python makes the calls
    assert not compiled(row, random(2, 3)).failures
    monkeypatch.setattr(graphs, "_apart", lambda graph, node, kept: node)
    assert not compiled(row, random(2, 3)).failures  # the write is noticed: the output shares its residual's version
    monkeypatch.setattr(calls, "share_versions", lambda outputs, values: None)
    assert failed(compiled(row, random(2, 3))) == {"write to output 0"}


def test_residuals_of_another_call_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is right at the inputs of that call, and wrong at others."""
    residuals = Compiled.residuals

    def first(self, inputs, outputs):
        tensors, static = residuals(self, inputs, outputs)
        self.first = getattr(self, "first", None) or [x.detach().clone() for x in tensors]
        return tuple(self.first), static

    monkeypatch.setattr(calls, "note_function", lambda function: False)  # Python makes the calls
    monkeypatch.setattr(Compiled, "residuals", first)
    found = failed(compiled(lambda x: x.tanh(), random(3)))
    assert "rev, eager, elsewhere" in found and not {"rev, eager", "rev, func", "forward, elsewhere"} & found
