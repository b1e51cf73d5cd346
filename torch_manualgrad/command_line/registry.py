"""`list` and `show`: rules, formulas, and operators without a rule."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..core.override.names import missing, rules_named
from ..core.rule import CompiledVjp, Formula, Rule, ops, parameters, rules
from ..core.rule.catalogue import KINDS, catalogue
from ..core.rule.formulas import ArgumentBinding
from .answer import Answer, Fields, Part, Source, Table
from .targets import Unknown

__all__ = ["ended_claims", "kernels_of", "list_all", "show"]


# attributes of `CompiledVjp` that are names of inputs and outputs -> what these must be
_CONDITIONS = {
    "contiguous": "contiguous",
    "one_batch": "equal batch dims of",
    "square": "square",
    "nonzero": "no zeros in",
}


def list_all(name: str | None = None, *, everything: bool = False) -> Answer:
    """Rules, operators without one, and formulas, sorted by name.

    Args:
        name: only what has this in its name, and the rules that `override` takes by it, with their formulas.
        everything: each operator without a rule, and not only their number by kind. With a name it is each, always.
    """
    meant = set(rules_named(name)) if name else set()
    own = {formula for rule in meant for formula in rule.formulas}

    def wanted(entry: str) -> bool:
        return name is None or name.lower().removesuffix(".default") in entry.lower()

    with_rule = [
        [full, rule.kind, ", ".join(rule.improves), ", ".join(f.__name__ for f in rule.formulas)]
        for full, rule in sorted(rules.items())
        if wanted(full) or rule in meant
    ]
    without = [[e.name, e.kind, e.reason or KINDS[e.kind]] for _, e in sorted(catalogue.items()) if wanted(e.name)]
    formulas = [
        [short, ", ".join(kernels_of(f)), _first_line(f)]
        for short, f in sorted(ops.items())
        if wanted(short) or f in own
    ]
    absent = [("absent", reason) for full, reason in sorted(rules.absent.items()) if wanted(full)]
    if not (with_rule or without or formulas or absent):
        raise Unknown(f"{missing(str(name))} (`manualgrad list` prints all names)")
    parts: list[Part] = [Table("rules", ["rule", "kind", "improves", "formulas"], with_rule), Fields("absent", absent)]
    if name is None and not everything:
        counts = Counter(kind for _, kind, _ in without)
        lines = [[kind, str(n), KINDS[kind]] for kind, n in sorted(counts.items())]
        parts.append(Table("without a rule", ["without a rule", "operators", "why"], lines))
    else:
        parts.append(Table("without a rule", ["without a rule", "kind", "why"], without))
    parts.append(Table("formulas", ["formula", "kernels", "what"], formulas))
    return Answer([part for part in parts if name is None or not _is_empty(part)])


def _is_empty(part: Part) -> bool:
    return isinstance(part, Table) and not part.lines or isinstance(part, Fields) and not part.pairs


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


@functools.cache
def _called(formula: Formula) -> frozenset[str]:
    """The formulas that a formula's body names."""
    code, known = formula.reference.__code__, formula.reference.__globals__
    return frozenset(name for name in code.co_names if isinstance(known.get(name), Formula))


def _users(formula: Formula) -> list[str]:
    """The rules that use a formula, also through others, or as what plain calls run."""
    found, last = {formula.__name__}, 0
    while len(found) > last:
        last = len(found)
        found |= {name for name, one in ops.items() if isinstance(one, Formula) and found & _called(one)}
    return [
        rule.name
        for rule in rules.values()
        if any(f.__name__ in found for f in rule.formulas)
        or rule.compiled_vjp is not None
        and rule.compiled_vjp.formula is formula
    ]


def _show_formula(formula: Formula) -> Answer:
    users = _users(formula)
    fields = [
        ("formula", formula.__name__),
        ("schema", str(formula.signature.schema)),
        ("kernels", ", ".join(kernels_of(formula)) or "none: transparent to autograd, vmap and the compiler"),
        ("used by", ", ".join(users) or "no rule"),
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
        *[("compiled", _compiled(vjp)) for vjp in [rule.compiled_vjp] if vjp is not None],
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


def _compiled(vjp: CompiledVjp) -> str:
    """The formula that plain calls run instead of the vjp, without Python, and the calls that it takes."""
    conditions = [
        *[f"up to order {vjp.largest}"] * (vjp.largest is not None),
        *["real"] * vjp.real,
        *[f"{name} = {value!r}" for name, value in vjp.only.items()],
        *[f"{what} {', '.join(getattr(vjp, name))}" for name, what in _CONDITIONS.items() if getattr(vjp, name)],
    ]
    kernels = "cpu" if vjp.on_cpu else ", ".join(device for device in vjp.formula.kernels if device != "default")
    limits = f"; only {', '.join(conditions)}" if conditions else ""
    return f"of {', '.join(vjp.names)}: {vjp.formula.__name__}, in C++ on {kernels}{limits}"


def _binding(function: Any) -> str:
    formula = getattr(function, "derivative", function)  # which an elementwise rule wraps
    if isinstance(formula, Formula):
        return formula.__name__
    if isinstance(formula, ArgumentBinding) or not callable(formula):
        return repr(formula) if not isinstance(formula, str) else formula
    return f"({', '.join(parameters(function))}) at {_place(function)}"


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(getattr(function, "derivative", function)).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
