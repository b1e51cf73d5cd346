"""What the registry says of PyTorch's operators, beside what PyTorch's schemas and its table of derivatives say."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.rules import has_history

import torch_manualgrad as mg
from torch_manualgrad.core.internals import is_composite, operators
from torch_manualgrad.core.rule import formula
from torch_manualgrad.core.rule.catalogue import KINDS, not_a_formula
from torch_manualgrad.core.versions import parse
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


# -- FunctionsManual ---------------------------------------------------------------------------------------------------

HEADER = Path(torch.__file__).parent / "include/torch/csrc/autograd/FunctionsManual.h"


def declared_functions():
    """The names that the header declares, without those inside of braces."""
    text = re.sub(r"//[^\n]*|^#[^\n]*", "", HEADER.read_text(), flags=re.MULTILINE)
    start, end = text.index("details {") + len("details {"), text.rindex("}")
    text = text[start:end]
    while "{" in text:
        text = re.sub(r"\{[^{}]*\}", ";", text)
    return {found[1] for statement in text.split(";") if (found := re.search(r"(\w+)\s*\(", statement))}


# The reasons that a release has no function for.
NEWER = {
    *("bessel_j1_backward", "bessel_y1_backward", "grid_sampler_2d_jvp", "grid_sampler_3d_jvp"),
    *("_cdist_backward_backward", "_pdist_backward_backward"),
    *("masked_fill_inplace_if_safe", "native_group_norm_backward_dispatcher"),
}
UNDECLARED = {"2.10": {*NEWER, "_miopen_ctc_loss_backward"}, "2.13": NEWER, "2.15": set()}
RELEASE = ".".join(map(str, parse(torch.__version__)))


@pytest.mark.skipif(RELEASE not in UNDECLARED, reason="the header of another release")
def test_every_function_of_functions_manual_is_a_formula_or_has_a_reason():
    declared = declared_functions()
    assert len(declared) >= 200 and {"norm_backward", "cat_jvp", "values_backward"} <= declared
    assert not declared - {*mg.ops} - {*mg.ops.absent}
    of_the_table = {"batch_norm_backward"}
    assert {*mg.ops.absent} - declared == of_the_table | UNDECLARED[RELEASE]


def test_the_error_for_such_a_function_has_the_reason():
    with pytest.raises(AttributeError, match="there is no formula 'warn_backwards': the identity with a warning"):
        _ = mg.ops.warn_backwards
    with pytest.raises(KeyError, match="logsumexp_jvp is 0 where all inputs are -inf"):
        _ = mg.ops["safe_logsumexp_jvp"]


def test_a_function_has_one_of_the_two():
    with pytest.raises(ValueError, match="'norm_backward' exists already"):
        not_a_formula("norm_backward", reason="none")
    with pytest.raises(ValueError, match="'warn_backwards' exists already"):

        @formula
        def warn_backwards(grad: torch.Tensor) -> torch.Tensor:
            return grad


def test_names_of_operators_with_an_entry_instead():
    """The reasons name operators and formulas that exist."""
    for text in mg.ops.absent.values():
        for name in re.findall(r"\b\w+_(?:backward|jvp|gradient)\b", text.split(": ", 1)[1]):
            assert name in mg.ops or any(r.startswith(f"aten::{name}") for r in [*mg.rules, *mg.catalogue]), name
