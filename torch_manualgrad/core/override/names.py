"""Looks up rules by name: those of an operator, or of every operator that a PyTorch function reaches.

``torch.linalg.svd`` is composite: autograd sees ``aten::_linalg_svd``, which has the rule. The table `operators_of` has
the operators of each public function.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name

from ..rule.catalogue import KINDS, catalogue, operators_of
from ..rule.definition import Rule, rules
from .replacements import Replacements, replacements

__all__ = ["Chosen", "choose", "missing", "rules_named"]


class Chosen(NamedTuple):
    """The rules and replacements that names select, each once."""

    rules: tuple[Rule, ...]
    replacements: tuple[Replacements, ...]


# Prefixes under which a function may be found.
_PREFIXES = ("torch.nn.functional.", "torch.Tensor.", "torch.functional.", "torch.")


def choose(names: Sequence[Any], strong_zero: bool = False) -> Chosen:
    """Select rules and replacements by names.

    Args:
        names: as for `install`. None given: every rule that improves on stock, and all replacements; "*": all.
        strong_zero: as for `install`: without names, it includes the rules that have strong zeros.

    Raises:
        KeyError: nothing has that name; the message suggests the nearest.
        TypeError: an entry is not a name, a function, an operator of torch.ops, a rule or a replacement.
    """
    find = _remembered if all(isinstance(name, Hashable) for name in names) else _choose
    return find(tuple(names), strong_zero, rules.version, replacements.version)


def _choose(names: tuple[Any, ...], strong_zero: bool, _rules: int, _replacements: int) -> Chosen:
    if not names:
        chosen = tuple(r for r in rules.values() if r.improves or strong_zero and r.has_strong_zero)
        return Chosen(chosen, tuple(replacements.values()))
    found = {one.name: one for name in names for one in _find(name)}
    return Chosen(
        tuple(one for one in found.values() if isinstance(one, Rule)),
        tuple(one for one in found.values() if isinstance(one, Replacements)),
    )


# Entering an override again is a look-up.
_remembered = functools.lru_cache(maxsize=128)(_choose)


def _find(name: Any) -> Sequence[Rule | Replacements]:
    if isinstance(name, (Rule, Replacements)):
        return [name]
    if not isinstance(name, str):
        name = _name_of(name)
    if name == "*":
        return [*rules.values(), *replacements.values()]
    if name in replacements:
        return [replacements[name]]
    if found := rules_named(name):
        return found
    raise KeyError(missing(name))


def rules_named(name: str) -> list[Rule]:
    """The rules of the operator of that name (by default all overloads), and of those that a function reaches.

    Args:
        name: ``"aten::dist"`` is the operator alone; ``"norm"`` the operators of that name and all that ``torch.norm``
            reaches.

    Returns:
        The rules; may be empty.
    """
    found = _of_operator(_full(name))
    if "::" not in name or not found:
        reached = [rules[n] for n in _reached(name) if n in rules] or _of_operator(f"aten::{_bare(name)}")
        found += [rule for rule in reached if rule not in found]
    return found


def _of_operator(full: str) -> list[Rule]:
    """The rule of that operator; without an overload in the name, and without its own rule, those of all overloads."""
    return [rules[full]] if full in rules else [r for n, r in rules.items() if n.startswith(f"{full}.")]


def missing(name: str) -> str:
    """The message for a name that has no rule here."""
    for absent in (_full(name), *_reached(name)):
        if absent in rules.absent:
            return rules.absent[absent]
    bare = _bare(name)
    for known in (_full(name), f"aten::{bare}"):
        if known in catalogue:
            entry = catalogue[known]
            return f"no rule acts on {name} ({entry.kind}): {entry.reason or KINDS[entry.kind]}"
    if "::" not in name and _is_public(name):
        return f"no rule acts on {name}"
    near = difflib.get_close_matches(_full(name), rules, n=3, cutoff=0.5)
    near += difflib.get_close_matches(bare, [*_by_name(), *replacements], n=2)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"there is no rule {name if name.startswith('torch.') else _full(name)!r}{hint}"


def _is_public(name: str) -> bool:
    found: Any = torch
    for part in name.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
    return callable(found)


def _full(name: str) -> str:
    return (name if "::" in name else f"aten::{name}").removesuffix(".default")


def _bare(name: str) -> str:
    """``torch.linalg.svd``, ``linalg.svd`` and ``aten::linalg_svd`` as ``linalg_svd``."""
    name = name.removeprefix("aten::").removesuffix(".default")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace(".", "_")


def _reached(name: str) -> list[str]:
    return [n if "::" in n else f"aten::{n}" for n in _by_name().get(_bare(name), ())]


@functools.cache
def _by_name() -> dict[str, tuple[str, ...]]:
    return {_bare(f"torch.{public}"): operators for public, operators in operators_of.items()}


def _name_of(given: Any) -> str:
    name = getattr(given, "_name", None) or getattr(given, "_qualified_op_name", None)  # of torch.ops
    if not isinstance(name, str) and callable(given) and getattr(given, "__hash__", None):
        name = resolve_name(given)
    if isinstance(name, str):
        return name
    raise TypeError(f"override takes names, functions of torch, operators of torch.ops and rules, got {given!r}")


def _rules_of(given: Any) -> list[Rule]:
    found = list(choose((given,)).rules)
    if not found:  # a name of replacements only
        raise KeyError(missing(str(given)))
    return found


rules.find_by(_rules_of)
