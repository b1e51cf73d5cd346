"""On CUDA every rule gives what it gives on the CPU, whose derivatives other tests compare with finite differences."""

from __future__ import annotations

import pytest
import torch
from helpers.devices import against_finite_differences, differences, runs
from helpers.layouts import compare_layouts

import torch_manualgrad as mg
from torch_manualgrad.testing import op_samples
from torch_manualgrad.testing.database.opinfo import reached

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DTYPES = [torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", mg.rules.values(), ids=lambda r: r.name)
def test_every_rule(rule, dtype):
    found = []
    with mg.override(rule):
        for sample, there in zip(rule.samples(dtype, "cpu"), rule.samples(dtype, "cuda"), strict=True):
            if runs(rule.aten, sample):
                found += [f"{sample}: {line}" for line in differences(rule.probe, sample, rule.gaps)]
            elif runs(rule.aten, there):
                found += [f"{there}: {line}" for line in against_finite_differences(rule.probe, there, rule.gaps)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", reached())
def test_the_operator_database(name, dtype):
    found = []
    with mg.override("*"):
        for case in op_samples(name, dtype, limit=4):
            found += [f"{case.sample}: {line}" for line in differences(case.fn, case.sample)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", mg.rules.values(), ids=lambda r: r.name)
def test_layouts_are_known_without_data(rule, dtype):
    for sample in rule.samples(dtype, "cuda"):
        if runs(rule.aten, sample):
            compare_layouts(rule, sample)
