"""On CUDA calls at levels of torch.func without Python give what the general kernel, in Python, gives."""

from __future__ import annotations

import pytest
import torch
from helpers.calls import needs_library
from helpers.devices import distance, on_cuda, runs
from helpers.levels import found_by, number_of
from helpers.rules import Call

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls

pytestmark = needs_library

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

RULES = [rule for rule in mg.rules.values() if rule.samples is not None and "_cpu" not in rule.name]
# sums by atomic operations round in any order
TOLERANCE = 1e-9


@pytest.mark.parametrize("way", ["grad of grad", "vmap of grad", "vjp"])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_gives_at_levels_what_it_gives_in_python(rule, way):
    for dtype in (torch.float64, torch.complex128):
        for number, sample in enumerate(rule.samples(dtype, "cpu")):
            moved = on_cuda(sample)
            if number > 1 or not (runs(rule.aten, moved) and runs(rule.probe, moved)):
                continue
            call = Call(rule, moved)
            if call.inputs and all(x.numel() for x in call.inputs):
                compare(call, way)


def compare(call, way):
    f = number_of(call)
    others = [x * 0.9375 if x.is_floating_point() else x for x in call.inputs]
    with mg.override(call.rule, "*"):
        with compiled_calls.in_python(), compiled_calls.recording_after(-1):
            expected = found_by(way, f, others)
            again = found_by(way, f, others)
        with compiled_calls.recording_after(0):
            found_by(way, f, call.inputs)
            found_by(way, f, call.inputs)
            found = found_by(way, f, others)
    if isinstance(expected, type) or isinstance(found, type):
        assert found is expected, f"{call}: {found}, and in Python {expected}"
        return
    assert distance(found, expected) <= max(TOLERANCE, 10 * distance(again, expected)), call
