"""The rules for jets by operator: a table that `rules` fills, and that tracing reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["JetRule", "fill", "jet_rule", "known"]

JetRule = Callable[..., Any]


class _Known:
    """The rules found so far, by operator name. They are attributes, because Dynamo keeps the first state of a
    dictionary.

    Attributes:
        run: ``(space, trace, tensors) -> result``, a trace on these tensors.
        derive: ``(name) -> rule``, for an operator without one.
    """

    run: Callable[..., Any]
    derive: Callable[[str], JetRule]


known = _Known()


def fill(rules: Mapping[str, JetRule], derive: Callable[[str], JetRule], run: Callable[..., Any]) -> None:
    """Enter the operators' rules, and the functions that find and run all others."""
    for name, rule in rules.items():
        setattr(known, _attribute(name), rule)
    known.derive, known.run = derive, run


def jet_rule(name: str) -> JetRule:
    """The rule that runs instead of an operator on jets.

    Raises:
        NotImplementedError: the operator is unknown.
    """
    attribute = _attribute(name)
    if not hasattr(known, attribute):
        setattr(known, attribute, known.derive(name))
    return getattr(known, attribute)


def _attribute(name: str) -> str:
    return name.replace("::", "__").replace(".", "_of_")
