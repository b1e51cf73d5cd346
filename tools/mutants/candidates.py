"""All mutants of a kind, in an order that spreads any number of them over the families of operators."""

from __future__ import annotations

import ast
import functools
import itertools
import random
import textwrap
from collections.abc import Iterator

import torch_manualgrad as mg
from torch_manualgrad.core.rule import Rule

from .compiled import compiled_mutants
from .operators import OPERATORS
from .own import own
from .source import Site, Source, sources
from .subject import Mutant, Subject, is_plain, of_rule
from .wrappers import WRAPPERS

#: The kinds, in the order of the page.
KINDS = (
    *("sign", "factor", "term", "transpose", "conjugate", "residual", "tangent", "cotangent", "broadcast", "index"),
    *("ties", "fake kernel", "vmap rule", "precision", "third order", "requires_grad", "compiled"),
)


@functools.cache
def candidates(kind: str) -> tuple[Mutant, ...]:
    """The mutants of this kind, which may turn out to be right all the same; the same ones in each process."""
    found: dict[str, list[Mutant]] = {}
    made = (m for m in itertools.chain(own(), compiled_mutants()) if m.kind == kind)
    for m in itertools.chain(_of_text(kind), _of_rules(kind), made):
        found.setdefault(m.family, []).append(m)
    shuffle = random.Random(kind)
    for group in found.values():
        shuffle.shuffle(group)
    rounds = itertools.zip_longest(*found.values())
    return tuple(m for round in rounds for m in round if m is not None)


def _of_text(kind: str) -> Iterator[Mutant]:
    change = OPERATORS.get(kind)
    if change is None:
        return
    known = {r.name for r in originals()}
    for source in sources():
        for site in source.sites:
            rules = [n for n in source.seen_by.get(site.statement, ()) if n in known]
            for i, node in enumerate(change(site.node) if rules else ()):
                place = f"{source.name}:{getattr(site.node, 'lineno', 0)}, node {site.place}, {i}"
                rule = random.Random(place).choice(rules)
                yield Mutant(
                    kind,
                    f"{rule}, {place}",
                    source.family,
                    lambda s=source, at=site, n=node, r=rule: _pair(s, at, n, r),
                    lambda at=site, n=node: f"{_text(at.node)} -> {_text(n)}",
                )


def _text(node: ast.AST) -> str:
    return textwrap.shorten(ast.unparse(ast.fix_missing_locations(node)), 90, placeholder=" ...")


def _pair(source: Source, site: Site, node: ast.AST, name: str) -> tuple[Subject, Subject]:
    return of_rule(source.changed(site, node, name)), of_rule(mg.rules[name])


def _of_rules(kind: str) -> Iterator[Mutant]:
    change = WRAPPERS.get(kind)
    if change is None:
        return
    for rule in originals():
        try:
            wrong = list(change(rule))
        except ValueError:  # its formulas cannot be bound anew
            continue
        for what, made in wrong:
            yield Mutant(
                kind,
                f"{rule.name}, {what}",
                family(rule),
                lambda m=made, r=rule: (of_rule(m), of_rule(r)),
            )


@functools.cache
def originals() -> tuple[Rule, ...]:
    """The registered rules that can be checked like any function."""
    return tuple(r for name in mg.rules if is_plain(r := mg.rules[name]))


def family(rule: Rule) -> str:
    """The folder of a rule's formulas."""
    for f in (*rule.vjp.values(), *rule.jvp.values()):
        f = getattr(f, "formula", f)
        f = getattr(f, "derivative", getattr(f, "reference", f))
        parts = getattr(f, "__module__", "").split(".")
        if "derivatives" in parts:
            return parts[parts.index("derivatives") + 1]
    return "other"
