"""Entries of operators that have no rule: kinds, and duplicates."""

import pytest

import torch_manualgrad as mg
from torch_manualgrad.core.rule.catalogue import Entry


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    monkeypatch.setattr(mg.rules, "_entries", dict(mg.rules._entries))
    monkeypatch.setattr(mg.catalogue, "_entries", dict(mg.catalogue._entries))


def test_one_entry_of_each_kind():
    mg.view("ours::view")
    mg.composite("ours::sum_of_squares", "ours::mean.default", reason="square, sum")
    mg.nondifferentiable("ours::argmax", reason="the result is an index")
    mg.gap("ours::rnn", reason="nobody needs it")
    assert mg.catalogue["ours::view"] == Entry("ours::view", "view")
    assert mg.catalogue["ours::mean"] == Entry("ours::mean", "composite", "square, sum")
    assert mg.catalogue["ours::argmax"].kind == "nondifferentiable"
    assert mg.catalogue["ours::rnn"].reason == "nobody needs it"
    assert "ours::rnn" not in mg.rules


def test_an_operator_is_one_kind_of_entry():
    with pytest.raises(ValueError, match="rule 'aten::linalg_lu' exists already"):
        mg.gap("aten::linalg_lu", reason="no")
    with pytest.raises(ValueError, match="entry 'aten::transpose.int' exists already"):
        mg.composite("aten::transpose.int")
    del mg.rules._entries["aten::sin"]
    mg.gap("aten::sin", reason="not yet")
    with pytest.raises(ValueError, match="entry 'aten::sin' exists already"):
        mg.elementwise("aten::sin", lambda self: self.cos())
    assert "aten::sin" not in mg.rules


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="no reason is given"):
        mg.gap("ours::rnn", reason="")
    with pytest.raises(ValueError, match="expected 'namespace::name'"):
        mg.view("transpose")
    with pytest.raises(KeyError, match="there is no entry 'aten::transpose'; did you mean 'aten::transpose.int'"):
        mg.catalogue["aten::transpose"]
