"""Operators on jets: a table from operators to rules, and the execution of a trace.

A rule is called with the space and the operator's arguments, some of them jets, and returns the operator's results.
An operator without an entry uses its rule in ``mg.rules`` (see `fallback`); without a rule it raises.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_manualgrad.core.registry import defined
from torch_manualgrad.core.rule import exists, operator, rules
from torch_manualgrad.core.rule.catalogue import catalogue

from . import (
    compositions as jet_compositions,
    elementwise as jet_elementwise,
    linear as jet_linear,
    products as jet_products,
)
from .examples import follow
from .fallback import by_custom_op, by_rule
from .rows import ELEMENTWISE, RowSpace, in_rows
from .table import JetRule, fill, jet_rule
from .tensor import Space, is_jet
from .trace import Trace, completed, decode, functional_form

__all__ = ["known_rules"]

_OWN: dict[str, JetRule] = {
    **jet_elementwise.RULES,
    **jet_linear.RULES,
    **jet_products.RULES,
    **jet_compositions.RULES,
}


def known_rules() -> list[str]:
    """The operators that have a recurrence or another entry."""
    return sorted(_OWN)


def _derived(name: str) -> JetRule:
    if name in rules:
        rule = rules[name]
        if all(hasattr(f, "is_operator") for f in rule.jvp.values()) and rule.jvp:
            return jet_linear.linear(rule)
        if name in jet_linear.PIECEWISE or rule.kind == "linear":
            return jet_linear.by_tangents(rule)
        return by_rule(rule)
    if (op := defined(name)) is not None:
        return by_custom_op(op)
    schema = operator(name)._schema
    if schema.is_mutable:
        raise NotImplementedError(f"{name}: no Taylor series is known of it: it writes to its arguments")
    if name in _SAMPLES:
        raise NotImplementedError(f"{name}: no Taylor series is known of it; use mean + std * torch.randn_like(mean)")
    if name in catalogue and catalogue[name].kind == "nondifferentiable":
        return jet_linear.constant(lambda space, *args, **kwargs: operator(name)(*_values(args), **_values(kwargs)))
    if all(str(r.type) == "Tensor" for r in schema.returns):
        return jet_linear.constant(lambda space, *args, **kwargs: _of_values(name, *args, **kwargs))
    raise NotImplementedError(_unknown(name))


# Their samples have derivatives, although PyTorch has none.
_SAMPLES = frozenset(f"aten::normal.{overload}" for overload in ("Tensor_Tensor", "Tensor_float", "float_Tensor"))


def _of_values(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run an unknown operator. It has no derivative if it returns no real or complex numbers."""
    found = operator(name)(*_values(args), **_values(kwargs))
    for x in found if isinstance(found, (list, tuple)) else [found]:
        if x.is_floating_point() or x.is_complex():
            raise NotImplementedError(_unknown(name))
    return found


def _unknown(name: str) -> str:
    return f"{name}: no Taylor series is known of it: it has no rule in mg.rules and no entry for jets"


def _values(x: Any) -> Any:
    """The values of jets."""
    if is_jet(x):
        return x.primal
    if isinstance(x, dict):
        return {k: _values(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return tuple([_values(v) for v in x])
    return [_values(v) for v in x] if isinstance(x, list) else x


def run(space: Space, trace: Trace, tensors: list[Any]) -> Any:
    """The calls of a trace on these tensors, some of them jets of the space."""
    known = {**dict(enumerate(tensors)), **dict(trace.constants)}
    for name, arguments, results in trace.nodes:
        args, kwargs = decode(arguments, known)
        _keep(step(space, name, args, kwargs), results, known)
    try:
        return decode(trace.result, known)
    except KeyError:
        names = ", ".join(dict.fromkeys(name for name, *_ in trace.nodes)) or "no operator"
        raise NotImplementedError(
            f"a jet has no series here: the result is computed outside the traced operators ({names})"
        ) from None


def _keep(found: Any, encoded: Any, known: dict[int, Any]) -> None:
    kind, content = encoded
    if kind == "tensor":
        known[content] = found
    elif kind in ("list", "tuple", "named"):
        content = content[1] if kind == "named" else content
        for one, e in zip(found, content):
            _keep(one, e, known)


# A trace is recorded on contiguous tensors, so it records views.
_RESHAPES = {"aten::view": torch.reshape, "aten::_unsafe_view": torch.reshape, "aten::_reshape_alias": torch.reshape}


def step(space: Space, name: str, args: Any, kwargs: Any) -> Any:
    """One operator, on jets of the space or not."""
    if not any(_has_jet(space, x) for x in args) and not any(_has_jet(space, x) for x in kwargs.values()):
        if name in _RESHAPES:
            return args[0].reshape(args[1])
        return operator(name)(*args, **kwargs)
    base, _, overload = name.partition(".")
    if base.endswith("_") or overload == "out" or overload.endswith("_out"):
        return _in_place(space, name, args, kwargs)
    found = _apply(space, name, args, kwargs)
    if name in jet_linear.VIEWS:
        for x in found if isinstance(found, (list, tuple)) else [found]:
            if is_jet(x):
                x.aliases = args[0].aliases
                x.aliases[0] += 1
    return found


def _apply(space: Space, name: str, args: Any, kwargs: Any) -> Any:
    rule = jet_rule(name)
    found = in_rows(space, name, rule, args, kwargs) if isinstance(space, RowSpace) else rule(space, *args, **kwargs)
    if space.batch_of is not None:
        follow(space, name, rule, name in ELEMENTWISE, args, kwargs, found)
    return found


def _has_jet(space: Space, x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_has_jet(space, v) for v in x)
    return space.has(x)


def _in_place(space: Space, name: str, args: Any, kwargs: Any) -> Any:
    """The functional form of the operator, whose result takes the place of the first argument's coefficients."""
    x: Any = args[0] if args else None
    base = name.partition(".")[0]
    if isinstance(x, (list, tuple)) or operator(name)._schema.arguments[0].alias_info is None and base.endswith("_"):
        raise NotImplementedError(f"{name}: no Taylor series is known of it: it writes to its arguments")
    if not base.endswith("_") or not _has_jet(space, x):
        raise NotImplementedError(
            f"{name} writes the result of a Taylor series into a tensor that is constant; use its functional form"
        )
    if x.aliases[0] > 1:
        raise NotImplementedError(f"{name} writes to a tensor that has views; use its functional form")
    functional = functional_form(name)
    if functional != "aten::copy" and not exists(functional):
        raise NotImplementedError(f"{name}: no Taylor series is known of it: it has no functional form")
    if functional == "aten::copy":
        source = args[1]
        found = torch.zeros_like(x.primal) + source
    else:
        found = _apply(space, functional, completed(name, functional, args, kwargs), kwargs)
    if is_jet(found):
        x.space, x.rows, x.examples = found.space, found.rows, found.examples
    primal, *terms = space.coefficients(found)
    x.primal, x.terms = primal, tuple(terms)
    return x


fill(_OWN, _derived, run)
