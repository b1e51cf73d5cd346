"""`check` of a rule: under its own override, with its own samples and gaps."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.testing import CheckFailed, check

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
