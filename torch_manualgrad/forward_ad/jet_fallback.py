"""An operator on jets by the jvp of its own rule, which raises the order one at a time.

Where y(t) = f(x(t)), y' is the jvp of f at x along x'. Run on series to order k, it gives y to order k + 1. A jvp that does
not ask for the result needs one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_manualgrad.core.binding import parameters
from torch_manualgrad.core.rule import Rule, operator

from . import taylor
from .jet_linear import packed, primal_of, term_of
from .jet_tensor import Space
from .jet_vmap import each_direction, leaves, rebuilt

__all__ = ["by_rule", "by_series"]

# The coefficients of all arguments, order by order, [0] the values -> those of all outputs, order by order, from 1.
Raise = Callable[[list[list[Any]], list[Any]], list[list[Any]]]


def by_rule(rule: Rule) -> Callable[..., Any]:
    """The rule for jets of an operator, given its rule."""
    uses_result = any(p in rule.signature.output_names for f in rule.jvp.values() for p in parameters(f))

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        values = rule.signature.bind(args, kwargs)
        primals = [primal_of(space, v) for v in values]
        given, named = rule.signature.split(primals)
        outputs = rule.signature.outputs(operator(rule.name)(*given, **named))
        terms = [[term_of(space, v, k) for v in values] for k in range(1, space.order + 1)]
        raise_order: Raise = lambda inputs, found: _raised(rule, uses_result, inputs, found)  # noqa: E731
        found = by_series(space, raise_order, primals, terms, list(outputs))
        return packed(space, rule, [[o, *[row[i] for row in found]] for i, o in enumerate(outputs)])

    return run


def by_series(
    space: Space, function: Raise, primals: list[Any], terms: list[list[Any]], outputs: list[Any]
) -> list[list[Any]]:
    """The coefficients of the outputs; along many curves by vmap, with the last one's sum and linear part apart."""
    if space.directions is None:
        return function([primals, *terms], outputs)
    lower = terms[:-1]
    flat = leaves(lower)
    places = [i for i, t in enumerate(flat) if t is not None]
    nothing = [None] * len(primals)
    shape: list[Any] = []

    def one(*given: Any) -> Any:
        full: list[Any] = [None] * len(flat)
        for i, t in zip(places, given):
            full[i] = t
        rows = function([primals, *rebuilt(lower, iter(full)), nothing], outputs)
        shape[:] = [rows]
        return leaves(rows)

    found: list[list[Any]] = [[None] * len(outputs) for _ in terms]
    if places:
        results = each_direction(one, *[flat[i] for i in places])
        found = rebuilt(shape[0], iter(results))
        found[-1] = [_each(space.collapse, v) for v in found[-1]]
    if any(t is not None for t in terms[-1]):
        linear = function([primals, terms[-1]], outputs)[0]
        found[-1] = [_sum(a, b) for a, b in zip(found[-1], linear)]
    return found


def _raised(rule: Rule, uses_result: bool, inputs: list[list[Any]], outputs: list[Any]) -> list[list[Any]]:
    order = len(inputs) - 1
    rows: list[list[Any]] = [outputs]
    runs = range(order) if uses_result else [order - 1]
    for k in runs:
        speed = [[_each(lambda t: t * (j + 1), v) for v in inputs[j + 1]] for j in range(k + 1)]  # noqa: B023
        if k == 0:
            _need_jvp(rule, order)
            rows.append(list(rule.derivative.jvp(inputs[0], outputs, _lists(inputs[0], speed[0]))))
            continue
        _need_jvp(rule, order)
        inner = Space(k)
        known = rows if uses_result else [outputs, *[[None] * len(outputs)] * k]

        def run(inner: Space = inner, known: Any = known, speed: Any = speed, k: int = k) -> Any:
            values = [_jet(inner, inputs[0][i], [inputs[j][i] for j in range(1, k + 1)]) for i in range(len(inputs[0]))]
            results = [_jet(inner, known[0][i], [known[j][i] for j in range(1, k + 1)]) for i in range(len(outputs))]
            along = [_along(inner, inputs[0][i], [s[i] for s in speed]) for i in range(len(inputs[0]))]
            return list(rule.derivative.jvp(values, results, along))

        found = inner.run(run)
        if uses_result:
            rows.append([_coefficient(inner, f, k, k + 1) for f in found])
        else:
            rows += [[_coefficient(inner, f, j, j + 1) for f in found] for j in range(order)]
    return rows[1:]


def _need_jvp(rule: Rule, order: int) -> None:
    if not rule.jvp and order > 1:
        raise NotImplementedError(
            f"{rule.name}: no Taylor series is known of it beyond the first order: its rule has no jvp formula"
        )


def _coefficient(space: Space, x: Any, k: int, divisor: int) -> Any:
    if isinstance(x, (list, tuple)):
        return [_coefficient(space, v, k, divisor) for v in x]
    if x is None:
        return None
    found = space.coefficients(x)[k]
    return found if found is None or divisor == 1 else found / divisor


def _jet(space: Space, primal: Any, terms: Sequence[Any]) -> Any:
    if isinstance(primal, (list, tuple)):
        return [_jet(space, p, [None if t is None else t[i] for t in terms]) for i, p in enumerate(primal)]
    return primal if all(t is None for t in terms) else space.jet([primal, *terms])


def _along(space: Space, primal: Any, speed: Sequence[Any]) -> Any:
    """The series of x'; None where x is constant."""
    if isinstance(primal, (list, tuple)):
        return [_along(space, p, [None if s is None else s[i] for s in speed]) for i, p in enumerate(primal)]
    if all(s is None for s in speed):
        return None
    return space.jet([torch.zeros_like(primal) if speed[0] is None else speed[0], *speed[1:]])


def _lists(primals: list[Any], tangents: list[Any]) -> list[Any]:
    return [[None] * len(p) if isinstance(p, list) and t is None else t for p, t in zip(primals, tangents)]


def _each(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_each(function, v) for v in x]
    return None if x is None else function(x)


def _sum(x: Any, y: Any) -> Any:
    if isinstance(x, list) and isinstance(y, list):
        return [_sum(a, b) for a, b in zip(x, y)]
    return taylor.sum_of((x, y))
