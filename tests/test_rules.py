"""Every rule, in every mode, on its own samples and on those of PyTorch's operator database.

A new rule is covered by being registered: nothing here names one.
"""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.testing import Report, check, op_samples

DTYPES = [torch.float64, torch.complex128]
RULES = list(mg.rules.values())


def samples(rule, dtype):
    """The rule's samples that the operator itself accepts in this dtype."""
    found = []
    for sample in rule.samples(dtype, "cpu"):
        try:
            rule.aten(*sample.args, **sample.kwargs)
        except (RuntimeError, NotImplementedError):
            assert dtype.is_complex, f"{rule.name} refuses its own sample {sample}"
            continue
        found.append(sample)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_all_modes_on_the_rules_own_samples(rule, dtype):
    found = samples(rule, dtype)
    assert found or dtype.is_complex
    with mg.override(rule):
        check(rule.aten, found, gaps=rule.gaps)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_forward_values_are_stocks_to_the_bit(rule):
    for sample in samples(rule, torch.float64):
        stock = rule.aten(*sample.args, **sample.kwargs)
        with mg.override(rule):
            x = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in sample.args]
            ours = rule.aten(*x, **sample.kwargs)
        torch.testing.assert_close(ours.detach(), stock, rtol=0, atol=0)


# The database's operators that reach a rule of ours, also those that are composed of others.
REACHED = [
    "cdist", "dist", "linalg.norm", "linalg.vector_norm", "masked.norm", "masked.normalize", "nn.functional.normalize",
    "nn.functional.cosine_similarity", "nn.functional.pairwise_distance", "nn.functional.pdist",
    "nn.functional.triplet_margin_loss", "norm", "renorm",
]  # fmt: skip
AT_ZERO = "linalg_norm_subgradients_at_zero"  # a variant of linalg.norm whose samples are all kinks


@pytest.mark.parametrize("name", REACHED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_modes_on_the_operator_database(name, dtype):
    report = Report()
    with mg.override("*"):
        for case in op_samples(name, dtype, limit=12):
            if case.name != AT_ZERO:
                report += check(case.fn, [case.sample], name=case.name, raise_on_failure=False)
    assert not report.failures, str(report)
    assert report.results or dtype.is_complex


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_kinks_every_mode_is_finite(dtype):
    """Where finite differences are no reference: the database's norms of zero vectors."""
    seen = 0
    with mg.override("*"):
        for case in op_samples("linalg.norm", dtype):
            x = case.sample.args[0].detach()
            if case.name != AT_ZERO or x.dim() != 1:
                continue
            seen += 1

            def f(x, case=case):
                return case.fn(x, *case.sample.args[1:], **case.sample.kwargs)[0].sum()

            def gradient(x, f=f):
                return torch.func.grad(f)(x).abs().sum()

            def tangent(x, f=f):
                return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]

            for mode in (f, gradient, tangent):
                assert torch.func.grad(mode)(x).isfinite().all(), case.sample
                assert torch.func.jvp(mode, (x,), (torch.ones_like(x),))[1].isfinite().all(), case.sample
    assert seen


def test_every_rule_says_where_it_comes_from_and_has_samples():
    for rule in RULES:
        assert rule.source and rule.samples is not None, rule.name
        assert rule.formulas, rule.name
        for mode, reason in rule.gaps.items():
            assert reason, (rule.name, mode)


def test_every_formula_says_where_it_comes_from():
    for formula in mg.ops.values():
        assert "Source:" in (formula.__doc__ or ""), formula.name
