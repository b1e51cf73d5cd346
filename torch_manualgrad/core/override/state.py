"""The active layers of this thread, as one table that calls read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .. import activation, compile_cache
from ..rule.definition import Rule, always
from ..rule.derivative import RuleDerivative, derivative_of
from . import compiled_calls
from .forward_mode import ForwardMode

__all__ = ["Acting", "Layer", "Replacing", "State", "here", "resolved"]


class Replacing(Protocol):
    """The part of `Replacements` that a layer uses."""

    name: str

    @property
    def fingerprint(self) -> str: ...

    def ensure_registered(self) -> None: ...


class Layer(NamedTuple):
    """The contents of one `install` or one entered `override`."""

    rules: tuple[Rule, ...]
    replacements: tuple[Replacing, ...]
    forward: bool
    strong_zero: bool
    named: bool
    forward_modes: tuple[ForwardMode, ...]
    copies_operands: bool


class Acting(NamedTuple):
    """The active derivative of one operator: a rule's, or else a way of forward mode for calls with tangents."""

    derivative: RuleDerivative | None
    defer_to_stock: Callable[..., bool] | None
    forward_mode: ForwardMode | None

    def defers(self, values: Sequence[Any]) -> bool:
        """Whether PyTorch keeps the call. With strong zeros only the library of calls can check PyTorch's gradients."""
        stays = self.derivative is not None and self.derivative.strong_zero
        return not stays and self.defer_to_stock is not None and self.defer_to_stock(*values)


class State(NamedTuple):
    """All layers together: the table that calls read, and the text that compiled graphs are guarded by.

    ``copies_operands``: in-place operators copy operands that share memory with the written tensor.
    """

    table: dict[str, Acting]
    replacements: frozenset[Any]
    copies_operands: bool
    what: str
    code: str


@functools.lru_cache(maxsize=128)  # so that entering again is a look-up
def resolved(layers: tuple[Layer, ...]) -> State:
    """Several layers as one: the last rule for an operator, or a way of forward mode if it has no rule."""
    rules = {rule.name: (rule, layer) for layer in layers for rule in layer.rules}
    forward_modes = {one.name: one for layer in layers for one in layer.forward_modes if one.name not in rules}
    replacements = {one.name: one for layer in layers for one in layer.replacements}
    table, what, code = {}, [], []
    for name, one in sorted(forward_modes.items()):
        table[name] = Acting(None, None, one)
        what.append(f"{name} {one.identity}")
        code.append(f"{name} {one.how} {one.fingerprint}")
    for name, (rule, layer) in sorted(rules.items()):
        derivative = derivative_of(rule, forward=layer.forward, strong_zero=layer.strong_zero)
        ours = layer.named or derivative.forward is not None
        defer_to_stock = None if ours else rule.defer_to_stock if rule.improves else always
        table[name] = Acting(derivative, defer_to_stock, None)
        how = " forward" * (derivative.forward is not None) + " defers" * (defer_to_stock is not None)
        how += " strong zero" * derivative.strong_zero
        what.append(f"{name} {rule.identity}{how}")
        code.append(f"{name} {rule.fingerprint}{how}")
    for name, replacement in sorted(replacements.items()):
        what.append(f"replacement {name}")
        code.append(f"replacement {name} {replacement.fingerprint}")
    copies_operands = any(layer.copies_operands for layer in layers)
    what += ["copies operands"] * copies_operands
    code += ["copies operands"] * copies_operands
    found = "; ".join(code)
    return State(
        table,
        frozenset(replacements.values()),
        copies_operands,
        "; ".join(what),
        compile_cache.digest(found) if found else "",
    )


class _Seen(NamedTuple):
    """The state of the process, and the active handles that determine it."""

    entries: tuple[Any, ...]
    layers: tuple[Layer, ...]
    state: State


_seen = _Seen((), (), resolved(()))
_scoped: dict[int, tuple[_Seen, State]] = {}  # by the number of a thread's scope beyond the process


def here() -> State:
    """The state of this thread."""
    seen = _seen
    if seen.entries is not activation.truth.entries:
        seen = _refresh()
    if activation.scoped and (number := compiled_calls.scope_here()):
        return _of_scope(seen, number)
    return seen.state


@activation.following
def _refresh() -> _Seen:
    global _seen
    entries = activation.truth.entries
    handles = [h for h in entries if not h.thread and not h.abandoned]
    layers = tuple(h.layer for h in handles)
    _seen = seen = _Seen(entries, layers, resolved(layers))
    compiled_calls.activate([h.number for h in handles])
    compiled_calls.collect()
    return seen


def _of_scope(seen: _Seen, number: int) -> State:
    known = _scoped.get(number)
    if known is None or known[0] is not seen:
        if len(_scoped) > 64:
            _scoped.clear()
        known = _scoped[number] = (seen, resolved((*seen.layers, *compiled_calls.layers_here())))
    return known[1]


compile_cache.rules_here = lambda: (here().what, here().code)
