"""The check of compiled functions: their derivatives in every mode, next to those of the function itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ...core.override.override import active_rules
from ..comparison import modes, report
from ..comparison.context import Context
from ..comparison.passes import Pairs
from ..comparison.problem import Problem
from ..inputs.tree import is_differentiable
from . import transforms
from .residuals import Pass, users_write
from .third_order import NESTINGS, nested, parts

CHECK = "compiled"
MANY = 4  # inputs, and outputs, that are taken one by one

#: A way to differentiate: its label, the modes that the function needs for it, and names and values of the results.
Way = tuple[str, tuple[str, ...], Callable[[Problem], list[tuple[str, Any]]]]


def compiled(c: Context) -> None:
    """Values and derivatives of the compiled function (`mg.compile`) are those of the function itself.

    They are compared in the modes that are checked, or in all modes if none is; in third order too if that check is
    requested. Second and third derivatives are computed twice, because the first computation differs: it finds out which
    tensors have to be saved. Values, gradients, tangents and second derivatives are also compared at other inputs of the same
    shapes, which reveals values that the graphs have baked in. Gradients are also compared for one input or output alone,
    and after writes to the outputs. Both functions use the derivatives of the active rules, or those of a plain
    `mg.override()` where none is active. A function that is not a single graph raises. For the first sample, the first
    derivative by ``torch.compile(backend="aot_eager")`` is compared too, which is the check "compile".
    """
    if "compile" not in c.checks:
        transforms.compiled(c, CHECK)
    p = c.problem
    with active_rules():
        torch.compiler.reset()
        q = p.but(fn=_compiled(p.fn, c.lowering))
        if not _compare(c, q, ("forward", (), _outputs)) or not p.applicable:
            return
        for way in _ways(c):
            _compare(c, q, way)
        there = replace(c, problem=_elsewhere(p))
        for way in _ways_elsewhere(there):
            _compare(there, _elsewhere(q), way)
        if c.gap("rev", "eager") is None and _is_asked("rev", c):
            _writes(c, q)


def _compiled(fn: Callable[..., Any], lowering: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    from ...compiling import compile  # here, as it imports Dynamo

    made: Callable[..., Any] = compile(function, dynamic=False, fullgraph=True, lowering=lowering)
    return made


def _compare(c: Context, q: Problem, way: Way) -> bool:
    """Compare one way to differentiate. Returns whether the compiled function ran."""
    label, _, compute = way
    try:
        expected = compute(c.problem)
    except Exception:
        return True  # the mode's own column reports it
    for again in range(2 if _order(label) > 1 else 1):

        def pairs() -> Pairs:
            found = compute(q)
            if [name for name, _ in found] != [name for name, _ in expected]:
                raise AssertionError(f"{len(found)} results, uncompiled {len(expected)}")
            return [(name, a, b) for (name, a), (_, b) in zip(found, expected, strict=True)]

        before = len(c.results)
        c.equal(CHECK, label if not again else f"{label}, again", pairs, _tolerance(c, label))
        if any(r.outcome != report.OK for r in c.results[before:]):
            return c.results[-1].outcome not in (report.RAISES, report.GAP)
    return True


def _order(label: str) -> int:
    return label.split(", ")[0].count("-") + 1


def _tolerance(c: Context, label: str) -> tuple[float, float]:
    """Two runs of one function in double precision differ by rounding; in lower precision the tolerance covers rounding."""
    sharper = 1e-2 if c.problem.dtype in (torch.float64, torch.complex128) else 1.0
    t = c.tolerance
    relative, absolute = (t.first, t.second, t.third)[_order(label) - 1]
    return relative * sharper, absolute * sharper * c.problem.size


def _is_asked(mode: str, c: Context) -> bool:
    return not c.modes or mode in c.modes


def _ways(c: Context) -> Iterator[Way]:
    for way in (*_first(c.problem), *_second(c.problem), *(_third() if "third order" in c.checks else ())):
        label, needed, _ = way
        mode, engine = label.split(", ")[:2]
        asked = _order(label) == 3 or _is_asked(mode, c)
        if (
            asked
            and not any(c.gap(m, engine) for m in needed)
            and not (_order(label) == 3 and c.gap("third order", label))
        ):
            yield way


def _elsewhere(p: Problem) -> Problem:
    """The problem at other inputs, a little nearer to zero."""
    return p.at([x * 0.9375 if is_differentiable(x) else x for x in p.leaves])


def _ways_elsewhere(c: Context) -> Iterator[Way]:
    """One way for each kind of graph, labelled as such."""
    some = ("rev, eager", "fwd, eager", "rev-rev, eager", "fwd-rev, eager")
    for label, needed, compute in (("forward", (), _outputs), *(way for way in _ways(c) if way[0] in some)):
        yield f"{label}, elsewhere", needed, compute


def _first(p: Problem) -> Iterator[Way]:
    yield "rev, eager", ("rev",), _gradient
    yield "rev, func", ("rev",), lambda p: list(zip(_gradient_names(p), modes.rev_func(p), strict=True))
    yield "fwd, eager", ("fwd",), _tangents
    yield "fwd, func", ("fwd",), lambda p: _named("tangent of output", torch.func.jvp(p.call, p.primals, p.u)[1])
    if len(p.primals) > 1:
        for i, name in enumerate(p.names[:MANY]):
            yield f"rev, eager, {name} alone", ("rev",), partial(_gradient, inputs=[i])
            yield f"fwd, eager, {name} alone", ("fwd",), partial(_tangents, moving=i)
    if len(p.outputs) > 1:
        for j in range(min(len(p.outputs), MANY)):
            yield f"rev, eager, output {p.outputs[j]} alone", ("rev",), partial(_gradient, outputs=[j])


def _second(p: Problem) -> Iterator[Way]:
    for mode, engines in modes.SECOND.items():
        for engine, compute in engines.items():
            yield f"{mode}, {engine}", (mode,), partial(_along, compute)
    if len(p.outputs) > 1:
        for j in range(min(len(p.outputs), MANY)):
            yield f"rev-rev, eager, output {p.outputs[j]} alone", ("rev-rev",), partial(_curvature_of, j)


def _third() -> Iterator[Way]:
    for nesting in NESTINGS:
        for engine in ("eager", "func") if nesting.count("fwd") <= 1 else ("func",):
            yield f"{nesting}, {engine}", tuple(parts(nesting)), partial(_nested, nesting, engine)


def _outputs(p: Problem) -> list[tuple[str, Any]]:
    with torch.no_grad():
        return _named("output", p.flat(*p.primals))


def _named(what: str, values: Any) -> list[tuple[str, Any]]:
    return [(f"{what} {i}", x) for i, x in enumerate(values)]


def _gradient_names(p: Problem) -> list[str]:
    return [f"gradient of {n}" for n in p.names]


def _gradient(p: Problem, inputs: list[int] | None = None, outputs: list[int] | None = None) -> list[tuple[str, Any]]:
    names = _gradient_names(p)
    chosen = names if inputs is None else [names[i] for i in inputs]
    return list(zip(chosen, modes.gradient(p, inputs, outputs), strict=True))


def _tangents(p: Problem, moving: int | None = None) -> list[tuple[str, Any]]:
    with fwAD.dual_level():
        duals = [
            modes.make_dual(x, u) if moving in (None, i) else x
            for i, (x, u) in enumerate(zip(p.primals, p.u, strict=True))
        ]
        return _named("tangent of output", [modes.tangent_of(o) for o in p.call(*duals)])


def _along(compute: Callable[..., Tensor], p: Problem) -> list[tuple[str, Any]]:
    return [("the derivative along two directions", compute(p, p.curve))]


def _curvature_of(j: int, p: Problem) -> list[tuple[str, Any]]:
    return _along(lambda p, f: modes.rev_rev_eager(p, lambda *z: p.loss(*p.bent(*z), subset=[j])), p)


def _nested(nesting: str, engine: str, p: Problem) -> list[tuple[str, Any]]:
    return [("the derivative along three directions", nested(p, nesting, engine))]


def _writes(c: Context, q: Problem) -> None:
    """A write to an output between forward and backward changes no gradient, or backward raises."""
    try:
        expected = Pass(c.problem).backward()
    except Exception:
        return
    of_compiled = replace(c, problem=q)
    for i in range(min(len(q.base), MANY)):
        c.verdict(
            CHECK, f"write to output {i}", partial(users_write, of_compiled, expected, f"output {i}", "outputs", i)
        )
