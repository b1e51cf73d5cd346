"""An operator on jets by the jvp of its derivative, which raises the order one at a time.

If y(t) = f(x(t)), y' is the jvp of f at x along x'. Run on series of order k, it gives y to order k + 1. A jvp that
does not read the result needs only one run.

A series is never dropped: an input with a series that the jvp does not read raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_manualgrad.core.op.custom_op import CustomOp
from torch_manualgrad.core.op.derivatives import ReferenceDerivative, user_jvp
from torch_manualgrad.core.rule import Rule, operator, parameters
from torch_manualgrad.core.rule.derivative import derivative_of
from torch_manualgrad.core.schema import Signature

from . import taylor
from .linear import packed, primal_of, refuse_dropped, term_of
from .tensor import Space, is_jet
from .trace import is_tensor
from .vmap import each_direction, leaves, rebuilt

__all__ = ["by_custom_op", "by_rule", "by_series"]

# The coefficients of all arguments, order by order, [0] the values -> those of all outputs, order by order, from 1.
Raise = Callable[[list[list[Any]], list[Any]], list[list[Any]]]


class _Operator(NamedTuple):
    """An operator with its jvp.

    Attributes:
        name: of the operator.
        signature: its arguments and results.
        differentiable: whether each output has a derivative.
        jvp: ``(inputs, outputs, tangents) -> tangents``.
        first_order_only: why the jvp cannot run on series; None if it can.
        uses_result: whether the jvp reads the outputs.
    """

    name: str
    signature: Signature
    differentiable: Sequence[bool]
    jvp: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]
    first_order_only: str | None
    uses_result: bool


def by_rule(rule: Rule) -> Callable[..., Any]:
    """The rule for jets of an operator, given its rule."""
    first_order_only = None if rule.jvp else "its rule has no jvp formula"
    uses_result = any(p in rule.signature.output_names for f in rule.jvp.values() for p in parameters(f))
    derivative = derivative_of(rule)
    about = _Operator(
        rule.name, rule.signature, derivative.differentiable, derivative.jvp, first_order_only, uses_result
    )

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        values = rule.signature.bind(args, kwargs)
        refuse_dropped(space, rule, values)
        return _run(space, about, values)

    return run


def by_custom_op(op: CustomOp) -> Callable[..., Any]:
    """The rule for jets of a custom operator: that of the derivative registered at the time of the call."""

    def run(space: Space, *args: Any, **kwargs: Any) -> Any:
        selected = op.selected
        derivative = selected.derivative
        if selected.autograd is not None or derivative is None:
            reason = "its autograd kernel is its own" if selected.autograd is not None else "it has no derivative"
            if op.signature.written:
                reason = f"it writes to {op.signature.names[op.signature.written[0]]!r}; call its functional op"
            raise NotImplementedError(f"{op.name}: no Taylor series is known of it: {selected.error or reason}")
        if isinstance(derivative, ReferenceDerivative):
            return derivative.reference(*args, **kwargs)
        rule: Any = getattr(derivative, "tangent_rule", None)
        jvp = derivative.jvp
        if rule is not None:

            def jvp(inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
                watched = _Watched(op.signature.Inputs(*tangents))
                found = user_jvp(op.signature, rule, inputs, outputs, watched)
                watched.check(op)
                return found

        first_order_only = "it has no jvp" if rule is None else None
        about = _Operator(op.name, op.signature, derivative.differentiable, jvp, first_order_only, True)
        return _run(space, about, op.signature.bind(args, kwargs))

    return run


class _Watched:
    """The tangents for a jvp; records which of them it reads."""

    def __init__(self, tangents: Any) -> None:
        self._tangents, self._read = tangents, set()  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        self._read.update([name] if name in self._tangents._fields else self._tangents._fields)
        return getattr(self._tangents, name)

    def __iter__(self) -> Any:
        self._read.update(self._tangents._fields)
        return iter(self._tangents)

    def __getitem__(self, place: Any) -> Any:
        self._read.update(self._tangents._fields)
        return self._tangents[place]

    def __len__(self) -> int:
        return len(self._tangents)

    def check(self, op: CustomOp) -> None:
        """Raise if an input has a tangent that was not read."""
        for name, field, tangent in zip(op.signature.names, self._tangents._fields, self._tangents):
            if field not in self._read and any(t is not None for t in leaves([tangent])):
                raise NotImplementedError(
                    f"{op.name}: no Taylor series is known of it in {name!r}: its jvp does not read that tangent. "
                    "Call .detach() first to hold the value constant."
                )


def _run(space: Space, about: _Operator, values: Sequence[Any]) -> Any:
    # traces use contiguous tensors, which some kernels require
    primals = [_each(_contiguous, primal_of(space, v)) for v in values]
    given, named = about.signature.split(primals)
    outputs = about.signature.outputs(operator(about.name)(*given, **named))
    terms = [[term_of(space, v, k) for v in values] for k in range(1, space.order + 1)]
    known = [_each(_without_series, o) for o in outputs]
    found = by_series(space, lambda inputs, known: _raised(about, inputs, known), primals, terms, known)
    series = [[o, *[row[i] for row in found]] for i, o in enumerate(outputs)]
    return packed(space, about.name, about.signature.output_names, about.differentiable, series)


def _without_series(x: Any) -> Any:
    """The value of an output that has no series in an enclosing space: a jvp holds it constant."""
    while is_jet(x) and x.lost is not None:
        x = x.primal
    return x


def _contiguous(x: Any) -> Any:
    return x.contiguous() if is_tensor(x) and x.layout is torch.strided else x


def by_series(
    space: Space, function: Raise, primals: list[Any], terms: list[list[Any]], outputs: list[Any]
) -> list[list[Any]]:
    """The coefficients of the outputs; along many curves by vmap, with sum and linear part of the last separate."""
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


def _raised(about: _Operator, inputs: list[list[Any]], outputs: list[Any]) -> list[list[Any]]:
    order = len(inputs) - 1
    if about.first_order_only is not None and order > 1:
        raise NotImplementedError(
            f"{about.name}: no Taylor series is known of it beyond the first order: {about.first_order_only}"
        )
    rows: list[list[Any]] = [outputs]
    runs = range(order) if about.uses_result else [order - 1]
    for k in runs:
        speed = [[_each(lambda t: t * (j + 1), v) for v in inputs[j + 1]] for j in range(k + 1)]  # noqa: B023
        if all(t is None for t in leaves(speed)):  # a jvp may assume at least one tangent
            rows += [[None] * len(outputs) for _ in range(k + 2 - len(rows))]
            continue
        if k == 0:
            rows.append(list(about.jvp(inputs[0], outputs, _lists(inputs[0], speed[0]))))
            continue
        inner = Space(k)
        known = rows if about.uses_result else [outputs, *[[None] * len(outputs)] * k]

        def run(inner: Space = inner, known: Any = known, speed: Any = speed, k: int = k) -> Any:
            values = [_jet(inner, inputs[0][i], [inputs[j][i] for j in range(1, k + 1)]) for i in range(len(inputs[0]))]
            results = [_jet(inner, known[0][i], [known[j][i] for j in range(1, k + 1)]) for i in range(len(outputs))]
            along = [_along(inner, inputs[0][i], [s[i] for s in speed]) for i in range(len(inputs[0]))]
            return list(about.jvp(values, results, along))

        found = inner.run(run)
        if about.uses_result:
            rows.append([_coefficient(inner, f, k, k + 1) for f in found])
        else:
            rows += [[_coefficient(inner, f, j, j + 1) for f in found] for j in range(order)]
    return rows[1:]


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
    """The series of x'; None if x is constant."""
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
