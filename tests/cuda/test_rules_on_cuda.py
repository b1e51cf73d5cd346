"""On CUDA every rule gives what it gives on the CPU, whose derivatives other tests compare with finite differences."""

from __future__ import annotations

import pytest
import torch
from helpers.devices import against_finite_differences, differences, on_cuda, runs
from helpers.layouts import compare_layouts

import torch_manualgrad as mg
from torch_manualgrad.testing import check, op_samples
from torch_manualgrad.testing.database.opinfo import reached

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DTYPES = [torch.float64, torch.complex128]
# test_programs_on_cuda.py covers the operators that only take single or half precision
RULES = [rule for rule in mg.rules.values() if rule.samples is not None and "_cpu" not in rule.name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule(rule, dtype):
    """If a sample made on the CPU does not suit CUDA (other options, other saved tensors), finite differences decide."""
    lines, compared = [], False
    with mg.override(rule):
        for sample in rule.samples(dtype, "cpu"):
            moved = on_cuda(sample)
            if all(runs(rule.aten, s) for s in (sample, moved)) and runs(rule.probe, moved):
                compared = True
                lines += differences(rule.probe, sample, moved, rule.gaps)
    if compared and not lines:
        return
    found = []
    for sample in rule.samples(dtype, "cuda"):
        if runs(rule.aten, sample) and runs(rule.probe, sample) and not stock_is_wrong(rule, sample):
            with mg.override(rule):
                found += against_finite_differences(rule.probe, sample, rule.gaps)
    assert not found, "\n".join(found + lines)


def stock_is_wrong(rule, sample):
    """Whether PyTorch's own first derivative disagrees with its kernel, so that nothing can be concluded."""
    report = check(rule.probe, [sample], modes=("rev",), checks=(), raise_on_failure=False, diagnose=False)
    return report.outcome("rev") == "wrong"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", reached())
def test_the_operator_database(name, dtype):
    found = []
    with mg.override("*"):
        for case in op_samples(name, dtype, limit=4):
            moved = on_cuda(case.sample)
            if runs(case.fn, moved):
                found += [f"{moved}: {line}" for line in differences(case.fn, case.sample, moved, case.gaps)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_layouts_are_known_without_data(rule, dtype):
    for sample in rule.samples(dtype, "cuda"):
        if runs(rule.aten, sample) and runs(rule.probe, sample):
            compare_layouts(rule, sample)
