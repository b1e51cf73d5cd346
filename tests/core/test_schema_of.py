"""Schemas that are read from annotations are those of ``torch.library.infer_schema``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.schema import _written, schema_of


def several(x: Tensor, ys: Sequence[Tensor | None], n: int = 3, p: float | None = None) -> tuple[Tensor, Tensor]: ...
def with_text(x: Tensor, how: str = "none") -> Tensor: ...
def keywords(x: Tensor, *, n: int = 1) -> Tensor: ...
def nothing(x: Tensor) -> None: ...
def a_number(x: Tensor) -> float: ...


def lists(grad: Tensor, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]: ...
def a_layout(xs: Sequence[Tensor], layout: torch.layout) -> Tensor: ...


# types that the dispatcher takes and infer_schema does not know
BEYOND = {"Sequence[Sequence[int]]", "Sequence[torch.dtype]", "torch.layout"}


def test_types_that_pytorch_does_not_infer():
    assert schema_of(lists) == "(Tensor grad, SymInt[][] sizes, ScalarType[] dtypes) -> Tensor[]"
    assert schema_of(a_layout) == "(Tensor[] xs, Layout layout) -> Tensor"
    for function in (lists, a_layout):
        with pytest.raises(ValueError, match="unsupported type"):
            torch.library.infer_schema(function, mutates_args=())


@pytest.mark.parametrize("function", [several, with_text, keywords, nothing, a_number])
def test_schema_of_a_function(function):
    assert schema_of(function) == torch.library.infer_schema(function, mutates_args=())


def test_schema_of_every_formula():
    functions = [formula.reference for formula in mg.ops.values()]
    known = [f for f in functions if not {*f.__annotations__.values()} & BEYOND]
    assert len(known) > 0.9 * len(functions)
    for function in known:
        assert schema_of(function) == torch.library.infer_schema(function, mutates_args=())
    read = sum(_written(function) is not None for function in functions)
    assert read > 0.9 * len(functions)  # the others take a hundred times as long


def test_a_type_of_another_meaning_is_not_mistaken():
    names = {"Tensor": int, "__name__": __name__}
    exec("def f(x: 'Tensor') -> 'Tensor': ...", names)
    assert _written(names["f"]) is None


def test_a_missing_annotation_raises():
    with pytest.raises(ValueError, match="must have a type annotation"):
        schema_of(lambda x: x)
