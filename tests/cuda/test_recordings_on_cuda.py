"""On CUDA a recorded vjp that is played gives what Python gives, for other values and in every order."""

from __future__ import annotations

import pytest
import torch
from helpers.calls import needs_library
from helpers.devices import distance, on_cuda, runs
from helpers.rules import Call, orders, played_and_in_python

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls

pytestmark = needs_library

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

RULES = [rule for rule in mg.rules.values() if rule.samples is not None and "_cpu" not in rule.name]
# sums by atomic operations round in any order
TOLERANCE = 1e-9


def calls(rule, dtype):
    for sample in rule.samples(dtype, "cpu"):
        moved = on_cuda(sample)
        if runs(rule.aten, moved) and runs(rule.probe, moved):
            call = Call(rule, moved)
            if call.inputs and all(x.numel() for x in call.inputs):
                yield call


@pytest.mark.parametrize("strong_zero", [False, True], ids=["plain", "strong"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_for_other_values(rule, dtype, strong_zero):
    for number, call in enumerate(calls(rule, dtype)):
        if number == 2:
            break
        others = [0.75 * x for x in call.inputs]
        both = played_and_in_python(call, rule, others, strong_zero=strong_zero)
        if both is None:
            continue
        found, expected = both
        with mg.override(rule, "*", strong_zero=strong_zero), compiled_calls.recording_after(-1):
            noise = max(TOLERANCE, 10 * distance(orders(call, others), expected))
        assert distance(found, expected) <= noise, call


def test_a_training_step_is_played_and_captured_in_a_graph():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU()).cuda().double()
    x = torch.randn(5, 4, device="cuda", dtype=torch.float64)

    seen = []

    def step():
        y = model(x)
        # in the engine's thread for the device, whose counts these are
        y.register_hook(lambda _: seen.append((compiled_calls.counts().python, compiled_calls.recordings_played())))
        return torch.autograd.grad(y.square().sum(), list(model.parameters()))

    expected = step()
    with mg.override("*"):
        for _ in range(3):
            step()
        found = step()
        step()
        (python, played), (python_after, played_after) = seen[-2:]
        assert python == python_after and played < played_after
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
    assert distance(list(found), list(expected)) <= TOLERANCE
    assert distance(list(captured), list(expected)) <= TOLERANCE
