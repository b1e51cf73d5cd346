"""Operators without a rule: each PyTorch operator has a rule or exactly one entry here.

"Zero", "not differentiable" and "not implemented" are three different things. A zero derivative is a rule; the other
two are entries here, next to views and composites, whose derivatives are PyTorch's own or follow from the operators
that they call.
"""

from __future__ import annotations

from typing import NamedTuple

from ..registry import Registry
from .definition import rules
from .formulas import ops

__all__ = [
    "KINDS",
    "Entry",
    "catalogue",
    "composite",
    "gap",
    "nondifferentiable",
    "not_a_formula",
    "operators_of",
    "view",
]

# kind -> its statement about an operator
KINDS: dict[str, str] = {
    "view": "returns a view, which PyTorch differentiates",
    "composite": "is made of other operators, which have the derivatives",
    "nondifferentiable": "returns what has no derivative",
    "gap": "has a derivative that is not implemented here",
}


class Entry(NamedTuple):
    """An operator without a rule.

    Attributes:
        name: the operator, ``"aten::transpose.int"``.
        kind: one of `KINDS`.
        reason: why, if the kind does not explain it.
    """

    name: str
    kind: str
    reason: str = ""


catalogue: Registry[Entry] = Registry(
    "entry", beside=rules, instead="pass register=False to a rule of your own, or remove the entry"
)
operators_of: dict[
    str, tuple[str, ...]
] = {}  # a public function below torch -> the operators with a rule that it reaches


def view(*names: str) -> None:
    """Declare operators that return views of their arguments: PyTorch tracks these, and differentiates them.

    Args:
        names: operators, ``"aten::transpose.int"``.

    Raises:
        ValueError: one has a rule, or another entry.
    """
    _enter("view", names)


def composite(*names: str, reason: str = "") -> None:
    """Declare composite operators: autograd sees only the operators that they call.

    Args:
        names: operators, ``"aten::linalg_norm"``.
        reason: which others, if that is of interest.

    Raises:
        ValueError: one has a rule, or another entry.
    """
    _enter("composite", names, reason)


def nondifferentiable(*names: str, reason: str) -> None:
    """Declare operators without a derivative.

    Args:
        names: operators, ``"aten::argmax"``.
        reason: the results or inputs without a derivative.

    Raises:
        ValueError: one has a rule, or another entry; or there is no reason.
    """
    _enter("nondifferentiable", names, reason)


def gap(*names: str, reason: str) -> None:
    """Declare operators with a derivative that this package does not implement.

    Args:
        names: operators, ``"aten::unique_dim"``.
        reason: why not, and PyTorch's behaviour.

    Raises:
        ValueError: one has a rule, or another entry; or there is no reason.
    """
    _enter("gap", names, reason)


def not_a_formula(*names: str, reason: str) -> None:
    """Declare why functions of PyTorch's FunctionsManual are not in ``mg.ops``, for the error for an unknown formula.

    Args:
        names: functions, ``"warn_backwards"``.
        reason: the replacement, or why there is none.

    Raises:
        ValueError: one is a formula, or has another reason.
    """
    for name in names:
        ops.without(name, f"there is no formula {name!r}: {reason}")


def _enter(kind: str, names: tuple[str, ...], reason: str = "") -> None:
    if not reason and kind in ("nondifferentiable", "gap"):
        raise ValueError(f"{kind}: {', '.join(names)}: no reason is given")
    for name in names:
        if "::" not in name:
            raise ValueError(f"{kind} {name!r}: expected 'namespace::name' or 'namespace::name.overload'")
        catalogue.add(name.removesuffix(".default"), Entry(name.removesuffix(".default"), kind, reason))
