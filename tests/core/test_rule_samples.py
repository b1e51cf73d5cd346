import copy
import sys

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.rule import Sample, probe_for, rule, samples, samples_for, samples_in

BODY = """
from torch_manualgrad.core.rule import Sample, samples_for

@samples_for("aten::{op}")
def some(dtype, device):
    yield Sample()
"""


@pytest.fixture(autouse=True)
def tables_of_their_own(monkeypatch):
    """What these tests register is gone afterwards."""
    mg.rules["aten::sin"].samples  # noqa: B018  loads what is registered
    for table in ("_samplers", "_probes", "_unloaded"):
        monkeypatch.setattr(samples, table, copy.copy(getattr(samples, table)))


def test_samples_are_imported_when_they_are_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "samples_of_tests.py").write_text(BODY.format(op="sin"))
    samples_in("samples_of_tests")
    made = rule("aten::sin", vjp={"self": lambda grad: grad}, register=False)
    assert "samples_of_tests" not in sys.modules
    assert len(list(made.samples(torch.float64, "cpu"))) == 1 and "samples_of_tests" in sys.modules
    assert made.probe is made.aten


def test_a_module_that_cannot_be_imported_is_named_in_a_warning():
    samples_in("no_such_module_of_samples")
    with pytest.warns(RuntimeWarning, match="samples of no_such_module_of_samples are missing: .*ModuleNotFoundError"):
        assert mg.rules["aten::linalg_lu_factor_ex"].samples is not None
    assert mg.rules["aten::linalg_lu"].samples is not None


def test_an_operator_has_samples_and_a_probe_once():
    assert mg.rules["aten::linalg_lu"].samples is not None  # loads them
    with pytest.raises(ValueError, match="aten::linalg_lu has samples already: torch_manualgrad.derivatives.samples"):
        samples_for("aten::linalg_lu")(lambda dtype, device: [Sample()])
    probe_for("manualgrad_tests::no_such")(torch.sin)
    with pytest.raises(ValueError, match="has a probe already"):
        probe_for("manualgrad_tests::no_such")(torch.cos)


def test_samples_are_registered_for_rules_only():
    from torch_manualgrad.core.rule.catalogue import catalogue  # operators of GPUs, where there is none
    from torch_manualgrad.core.rule.samples import _probes, _samplers

    mg.rules["aten::sin"].samples  # noqa: B018
    own = [n for t in (_samplers, _probes) for n, f in t.items() if f.__module__.startswith("torch_manualgrad.")]
    known = {*mg.rules, *mg.rules.absent, *catalogue}
    assert own and not [n for n in own if n not in known]
