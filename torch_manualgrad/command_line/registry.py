"""`list` and `show`: rules, formulas, and operators without a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..core.binding import Binding, parameters
from ..core.catalogue import KINDS, catalogue
from ..core.formula import Formula, ops
from ..core.names import missing, rules_named
from ..core.rule import Rule, rules
from .answer import Answer, Fields, Source, Table
from .targets import Unknown

__all__ = ["ended_claims", "kernels_of", "list_all", "show"]


def list_all() -> Answer:
    """Every rule, every operator without one and why, every formula."""
    with_rule = [
        [name, rule.kind, ", ".join(rule.improves), ", ".join(f.__name__ for f in rule.formulas)]
        for name, rule in rules.items()
    ]
    without = [[e.name, e.kind, e.reason or KINDS[e.kind]] for e in catalogue.values()]
    formulas = [[name, ", ".join(kernels_of(f)), _first_line(f)] for name, f in ops.items()]
    return Answer(
        [
            Table("rules", ["rule", "kind", "improves", "formulas"], with_rule),
            Fields("absent", [("absent", reason) for reason in rules.absent.values()]),
            Table("without a rule", ["without a rule", "kind", "why"], without),
            Table("formulas", ["formula", "kernels", "what"], formulas),
        ]
    )


def show(name: str) -> Answer:
    """A formula, a rule or several, or an operator without a rule."""
    if name.removeprefix("manualgrad::") in ops:
        return _show_formula(ops[name.removeprefix("manualgrad::")])
    full = f"aten::{name.removeprefix('aten::')}".removesuffix(".default")
    if full in catalogue:
        entry = catalogue[full]
        return Answer([Fields(entry.name, [(entry.kind, f"{entry.name}: {entry.reason or KINDS[entry.kind]}")])])
    found = rules_named(name)
    if not found:
        raise Unknown(f"{missing(name)}; {ops.missing(name)} (`manualgrad list` prints all names)")
    return Answer([_fields(rule) for rule in found])


def kernels_of(formula: Formula) -> list[str]:
    """The devices with a compiled kernel, and "python" for one in Python."""
    compiled = [device for device in formula.kernels if device != "default"]
    return compiled + ["python"] * formula.in_python


def ended_claims(rule: Rule) -> list[str]:
    """The claims that hold no longer on this torch."""
    return [f"{claim}, since torch {until}" for claim, until in rule.claims.items() if claim not in rule.improves]


def _first_line(formula: Formula) -> str:
    return (inspect.getdoc(formula.reference) or "").partition("\n")[0]


def _show_formula(formula: Formula) -> Answer:
    users = [rule.name for rule in rules.values() if formula in rule.formulas]
    fields = [
        ("formula", formula.__name__),
        ("schema", str(formula.signature.schema)),
        ("kernels", ", ".join(kernels_of(formula)) or "none: transparent to autograd, vmap and the compiler"),
        ("used by", ", ".join(users) or "no rule directly"),
        ("written", _place(formula.reference)),
    ]
    return Answer([Fields("formula", fields), Source("source", inspect.getsource(formula.reference).rstrip())])


def _fields(rule: Rule) -> Fields:
    pairs = [("rule", rule.name), ("schema", str(rule.aten._schema))]
    for what, bound in (("vjp", rule.vjp), ("jvp", rule.jvp)):
        pairs += [(what, f"of {', '.join(names)}: {_binding(function)}") for names, function in bound.items()]
    if not rule.jvp:
        pairs.append(("jvp", "derived from the vjp by transposition"))
    pairs += [
        ("formulas", ", ".join(f.__name__ for f in rule.formulas) or "none"),
        ("residuals", ", ".join(rule.residuals) or "none"),
        ("improves", ", ".join(rule.improves) or "nothing: override() leaves it off unless it is named"),
        *[("ended", ended) for ended in ended_claims(rule)],
        ("source", rule.source or "not given"),
        ("forward", "its own, under override(forward=True)" if rule.forward else "that of PyTorch"),
    ]
    if rule.not_differentiable:
        pairs.append(("constant", ", ".join(rule.not_differentiable)))
    pairs += [("gap", f"{gap}: {reason}") for gap, reason in rule.gaps.items()]
    return Fields(rule.name, pairs)


def _binding(function: Any) -> str:
    formula = getattr(function, "derivative", function)  # which an elementwise rule wraps
    if isinstance(formula, Formula):
        return formula.__name__
    if isinstance(formula, Binding):
        return repr(formula)
    return f"({', '.join(parameters(function))}) at {_place(function)}"


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(getattr(function, "derivative", function)).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
