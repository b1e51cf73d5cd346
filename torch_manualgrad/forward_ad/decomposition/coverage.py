"""The operators without forward mode in this torch: from its own table of derivatives, and custom ops."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ...core.internals import custom_ops_with_backward, is_composite
from ...core.rule import exists, operator
from ...testing.database import derivatives_yaml

__all__ = ["FIRST_ORDER_ONLY", "Lacking", "has_formula", "lacking"]

# PyTorch's formula for forward mode raises in reverse mode over it: it calls an operator without a derivative, or
# writes to a saved tensor.
FIRST_ORDER_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "_softmax _log_softmax _safe_softmax logsumexp logcumsumexp linalg_vector_norm norm.Scalar norm.ScalarOpt_dtype "
        "norm.ScalarOpt_dim _foreach_norm.Scalar dist renorm glu glu_backward hardsigmoid"
    ).split()
)


class Lacking:
    """An operator with a derivative in reverse mode, but not in forward mode.

    Attributes:
        op: the ``OpOverload``.
        differentiable: for each output, whether PyTorch differentiates it; None if that is unknown.
        has_backward: whether a gradient of any input is implemented.
    """

    def __init__(self, op: Any, differentiable: tuple[bool, ...] | None = None, has_backward: bool = True) -> None:
        self.op, self.differentiable, self.has_backward = op, differentiable, has_backward


def has_formula(op: Any) -> bool:
    """Whether PyTorch has a formula for forward mode; it has none for operators of other libraries."""
    name = op.name()
    return name.startswith("aten::") and name in _with_formula()


def lacking() -> Iterator[Lacking]:
    """The operators of this torch that lack forward mode, except views and operators that write to an argument."""
    yield from _of_pytorch()
    for op in custom_ops_with_backward():
        yield Lacking(op)


@functools.cache
def _with_formula() -> frozenset[str]:
    return frozenset(entry.name for entry in _entries() if _is_formula(entry))


@functools.cache
def _of_pytorch() -> tuple[Lacking, ...]:
    found = []
    for entry in _entries():
        if _is_formula(entry) or entry.is_in_place or entry.is_marked_nondifferentiable or not exists(entry.name):
            continue
        op = operator(entry.name)
        if op._schema.is_mutable or any(r.alias_info for r in op._schema.returns) or is_composite(op):
            continue
        marks = entry.lines.get("output_differentiability")
        differentiable = None if marks is None else tuple(m.strip() == "True" for m in marks.strip("[]").split(","))
        formulas = [text for text in entry.formulas if "not_implemented" not in text and text != "non_differentiable"]
        found.append(Lacking(op, differentiable, bool(formulas)))
    return tuple(found)


def _is_formula(entry: derivatives_yaml.Entry) -> bool:
    """Whether an output has a formula. An entry may have them by kind of tensor, one of which is dense."""
    if not entry.lines:
        return True
    keys = {key.strip() for keys in entry.lines for key in keys.split(",")} - {"output_differentiability"}
    inputs = {argument.split("=")[0].split()[-1] for argument in _arguments(entry.schema)}
    return not keys <= inputs


def _arguments(schema: str) -> list[str]:
    inside = schema.partition("(")[2].rpartition(" -> ")[0].rstrip(") ")
    return [part for part in inside.split(", ") if " " in part]


def _entries() -> list[derivatives_yaml.Entry]:
    return derivatives_yaml.entries() if derivatives_yaml.PATH.exists() else []
