"""Docstrings of formulas that take the descriptions of their parameters from the module.

Args:
    grad, x: tensors, (*, n).
    n: a number that is described in a text long enough to need a second line, because a docstring must not have lines
        that are longer than that.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import torchgen

import torch_manualgrad as mg
from torch_manualgrad.core.declared_arguments import declared
from torch_manualgrad.core.docstrings import documentation, entries
from torch_manualgrad.core.rule import reached


def some_backward(grad, x, n, extra):
    """The cotangent.

    Args:
        extra: only here.

    Returns:
        (*, n).
    """


def without_arguments(x, n):
    """The tangent.

    References:
        A paper.
    """


def only_some(x):
    """One line."""


def test_missing_parameters_are_described_as_in_the_module():
    assert dict(entries(documentation(some_backward))).keys() == {("extra",), ("grad", "x"), ("n",)}
    text = documentation(some_backward)
    assert "Args:\n    extra: only here.\n    grad, x: tensors, (*, n).\n    n: a number" in text
    assert text.endswith("Returns:\n    (*, n).\n\nReferences:\n    ATen some_backward.")
    assert max(map(len, text.splitlines())) <= 120
    assert declared(some_backward, lambda name: None)["grad"].shapes == (("*", "n"),)


def test_a_section_is_added_where_there_is_none():
    assert documentation(without_arguments).startswith(
        "The tangent.\n\nArgs:\n    x: tensors, (*, n).\n    n: a number"
    )
    assert documentation(without_arguments).endswith("\n\nReferences:\n    A paper.")
    assert documentation(only_some) == "One line.\n\nArgs:\n    x: tensors, (*, n).\n\nReferences:\n    ATen only_some."


def test_completing_a_docstring_twice_changes_nothing():
    def again(grad, x, n, extra): ...

    again.__doc__, again.__name__ = documentation(some_backward), "some_backward"
    assert documentation(again) == again.__doc__


def formulas():
    """The package's formulas, without those that other test files register."""
    return {n: f for n, f in mg.ops.items() if inspect.unwrap(f.reference).__module__.startswith("torch_manualgrad.")}


def test_every_parameter_of_every_formula_is_described():
    missing = {}
    for name, formula in formulas().items():
        described = {n for names, _ in entries(formula.__doc__) for n in names}
        if left := set(formula.signature.names) - described:
            missing[name] = left
    assert not missing


@pytest.mark.skipif(not reached("2.13"), reason="some of these functions came with later releases of torch")
def test_a_formula_without_a_reference_of_its_own_has_the_name_of_one_of_aten():
    yaml = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    header = Path(torch.__file__).parent / "include/torch/csrc/autograd/FunctionsManual.h"
    known = {name for file in (yaml, header) for name in re.findall(r"\w+", file.read_text())} | set(
        dir(torch.ops.aten)
    )
    added = {n for n, f in formulas().items() if f.__doc__.endswith(f"References:\n    ATen {n}.")}
    own = {n for n in added if "    References:\n" not in inspect.getsource(inspect.unwrap(mg.ops[n].reference))}
    assert own and own <= known


def test_a_note_and_references_of_the_module_hold_for_its_formulas(monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "__doc__", f"{__doc__}\nNote:\n    Not at zero.\n\nReferences:\n    A book.\n")
    assert documentation(only_some).endswith("\n\nNote:\n    Not at zero.\n\nReferences:\n    A book.")
    assert documentation(without_arguments).endswith("\n\nNote:\n    Not at zero.\n\nReferences:\n    A paper.")
