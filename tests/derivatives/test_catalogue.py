"""What the registry says of PyTorch's operators, beside what PyTorch's schemas and its table of derivatives say."""

from collections import Counter

import pytest
from helpers.rules import has_history

import torch_manualgrad as mg
from torch_manualgrad.core.internals import is_composite, operators
from torch_manualgrad.core.rule.catalogue import KINDS
from torch_manualgrad.testing.database import derivatives_yaml

OPERATORS = {op.name().removesuffix(".default"): op for op in operators("aten")}


def is_view(op):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def named(kind):
    return {name for name, entry in mg.catalogue.items() if entry.kind == kind}


@pytest.mark.parametrize("name", [n for n in mg.catalogue if n in OPERATORS])
def test_an_entry_fits_the_schema(name):
    op, kind = OPERATORS[name], mg.catalogue[name].kind
    assert kind in KINDS and (kind == "gap" or not op._schema.is_mutable)
    assert kind != "view" or is_view(op) and not is_composite(op)
    assert kind != "composite" or is_composite(op)


def test_every_view_is_an_entry():
    views = {name for name, op in OPERATORS.items() if is_view(op) and not is_composite(op)}
    assert views <= named("view") | named("nondifferentiable")


needs_table = pytest.mark.skipif(not derivatives_yaml.PATH.exists(), reason="this torch comes without its table")


@needs_table
def test_operators_that_pytorch_marks_nondifferentiable_have_an_entry():
    marked = {e.name for e in derivatives_yaml.entries() if e.is_marked_nondifferentiable and not e.is_in_place}
    wrongly = {name for name in mg.rules if not has_history(mg.rules[name])}
    assert marked <= named("nondifferentiable") | named("gap") | wrongly


@needs_table
def test_every_entry_of_pytorchs_table_is_accounted_for():
    """By exactly one rule, or entry of the catalogue: the registries share their names, so that two cannot be."""
    entries = derivatives_yaml.entries()
    print(f"\n{len(entries)} entries of derivatives.yaml: {dict(Counter(entry.kind for entry in entries))}")
    assert not [entry.name for entry in entries if not entry.kind]
