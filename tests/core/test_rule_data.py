"""A rule is frozen data, of which there is one: copies are the rule itself, and pickles have its name."""

import copy
import dataclasses
import pickle
import sys

import pytest

import torch_manualgrad as mg


def rule():
    return mg.rule("aten::sin", vjp={"self": lambda grad, self: grad * self.cos()}, improves="values", register=False)


def test_its_attributes_cannot_be_set():
    one = rule()
    for field in dataclasses.fields(one):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, None)
    for table in (one.vjp, one.jvp, one.claims, one.gaps):
        with pytest.raises(TypeError, match="does not support item assignment"):
            table["self"] = None


def test_it_names_the_module_that_defines_it():
    assert rule().module == __name__
    assert mg.rules["aten::upsample_nearest2d"].module == "torch_manualgrad.derivatives.convolution.upsample"
    own = [r for r in mg.rules.values() if r.is_built_in]
    assert all(r.module.startswith("torch_manualgrad.derivatives.") and r.module in sys.modules for r in own)


def test_copies_are_the_rule():
    one = rule()
    assert copy.copy(one) is one and copy.deepcopy([one])[0] is one


def test_rules_are_pickled_by_name():
    rules = [*mg.rules.values()]
    pickled = pickle.dumps(rules)
    assert all(found is one for found, one in zip(pickle.loads(pickled), rules, strict=True))
    assert len(pickle.dumps(rules[0])) < 200


def test_a_rule_in_no_table_is_not_pickled():
    with pytest.raises(pickle.PicklingError, match="rule aten::sin: it is not in mg.rules"):
        pickle.dumps(rule())


def test_an_override_with_rules_is_pickled():
    with pickle.loads(pickle.dumps(mg.override(mg.rules["aten::sin"], strong_zero=True))):
        assert [one.acting for one in mg.active()] == [mg.rules["aten::sin"]]
    assert not mg.active()
