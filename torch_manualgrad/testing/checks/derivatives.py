"""Checks of directional derivatives: the six modes, duality, undefined cotangents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ..comparison import modes
from ..comparison.context import Context
from ..comparison.problem import Problem, total
from ..numerics.arithmetic import inner


def _tried_singly(c: Context) -> list[int]:
    """The inputs to differentiate one by one; empty if there is only one input."""
    count = len(c.problem.primals)
    return list(range(min(count, 8))) if count > 1 else []


def _single(p: Problem, i: int) -> list[Tensor | None]:
    return [u if j == i else None for j, u in enumerate(p.u)]


def _partial_slope(p: Problem, wanted: Sequence[int]) -> Tensor:
    return inner(modes.gradient(p, wanted), [p.u[i] for i in wanted])


def rev(c: Context) -> None:
    """Gradients of both engines; each input's with only that input requiring grad, and with all but one."""
    p, reference = c.problem, total(c.joint_slope)
    c.number("rev", "eager", lambda: inner(modes.gradient(p), p.u), reference)
    c.number("rev", "func", lambda: inner(modes.rev_func(p), p.u), reference)
    if c.gap("rev", "eager") is None:
        for i in _tried_singly(c):
            slope = total(c.wide.slope(_single(c.wide, i)))
            c.number("rev", f"eager, {p.names[i]} alone", partial(_partial_slope, p, [i]), slope)
            if len(p.primals) > 2:
                others = [j for j in range(len(p.primals)) if j != i]
                slope = total(c.wide.slope([None if j == i else u for j, u in enumerate(c.wide.u)]))
                c.number("rev", f"eager, without {p.names[i]}", partial(_partial_slope, p, others), slope)


def fwd(c: Context) -> None:
    """Directional derivatives of both engines, and each with a tangent on one input only."""
    p, reference = c.problem, total(c.joint_slope)
    c.number("fwd", "eager", lambda: modes.fwd_eager(p, p.u), reference)
    c.number("fwd", "func", lambda: modes.fwd_func(p, p.u), reference)
    for i in _tried_singly(c):
        slope = total(c.wide.slope(_single(c.wide, i)))
        for engine, mode in (("eager", modes.fwd_eager), ("func", modes.fwd_func)):
            if c.gap("fwd", engine) is None:
                c.number("fwd", f"{engine}, {p.names[i]} alone", partial(mode, p, _single(p, i)), slope)


def second(mode: str) -> Callable[[Context], None]:
    def check(c: Context) -> None:
        for engine, compute in modes.SECOND[mode].items():
            c.number(mode, engine, partial(compute, c.problem, c.problem.curve), c.total_curvature, second=True)

    check.__doc__ = f"The second derivative {mode}, outer transform first."
    return check


def duality(c: Context) -> None:
    """<ct, jvp(t)> = <vjp(ct), t> for random ct and t: needs no finite differences, so it is exact to rounding."""
    p = c.problem
    cotangents = [
        (w / unit).to(o.dtype) if mask is None else _scatter(w / unit, mask, o)
        for w, unit, mask, o in zip(p.weights, p.unit, p.finite, p.call(*p.primals), strict=True)
    ]

    def func() -> tuple[float, float]:
        out_t = torch.func.jvp(p.call, p.primals, p.u)[1]
        pullback = torch.func.vjp(p.call, *p.primals)[1]
        return float(inner(cotangents, _masked(p.finite, out_t))), float(inner(pullback(tuple(cotangents)), p.u))

    def eager() -> tuple[float, float]:
        with fwAD.dual_level():
            out = p.call(*(modes.make_dual(x, u) for x, u in zip(p.primals, p.u, strict=True)))
            out_t = [modes.tangent_of(o) for o in out]
        xs = [x.detach().requires_grad_() for x in p.primals]
        grads = modes.pull(p.call(*xs), cotangents, xs)
        return float(inner(cotangents, _masked(p.finite, out_t))), float(inner(grads, p.u))

    for engine, compute in (("eager", eager), ("func", func)):
        if any(c.gap(mode, engine) for mode in ("rev", "fwd")):
            continue
        found = c.run("duality", engine, compute)
        if found is not None:
            relative, absolute = c.tolerance.first
            ours, theirs = found
            # a sum of many terms that cancel is judged relative to the loss too, which is about one
            limit = relative * max(abs(ours), abs(theirs)) + absolute * c.problem.size
            c.pair("duality", engine, ours, theirs, limit)


def _scatter(w: Tensor, mask: Tensor, o: Tensor) -> Tensor:
    flat = torch.zeros(o.numel(), dtype=o.dtype, device=o.device)
    flat[mask] = w.to(o.dtype)
    return flat.reshape(o.shape)


def _masked(finite: list[Tensor | None], tangents: Iterable[Tensor]) -> list[Tensor]:
    # 0 * nan is nan: where the output is infinite its tangent is left out
    kept = []
    for mask, t in zip(finite, tangents, strict=True):
        if mask is not None:
            clean = torch.zeros_like(t).reshape(-1)
            clean[mask] = t.reshape(-1)[mask]
            t = clean.reshape(t.shape)
        kept.append(t)
    return kept


def agreement(c: Context) -> None:
    """The engines and modes of one order against each other, to a smaller tolerance than finite differences allow."""
    # in double precision two engines differ only by rounding; in lower precision the tolerance covers rounding
    sharper = 1e-2 if c.problem.dtype in (torch.float64, torch.complex128) else 1.0
    orders = (("first", ("rev", "fwd"), c.tolerance.first), ("second", tuple(modes.SECOND), c.tolerance.second))
    for order, names, (relative, absolute) in orders:
        found = [(f"{m} [{e}]", x) for m in names for e, x in c.values.get(m, {}).items() if e in ("eager", "func")]
        if len(found) < 2:
            continue
        (one, x), *others = found
        other, y = max(others, key=lambda item: abs(item[1] - x))
        limit = (relative * max(abs(x), abs(y)) + absolute * c.problem.size) * sharper
        c.pair("agreement", f"{order} order", y, x, limit, f"{other} against {one}")


def undefined_cotangents(c: Context, limit: int = 16) -> None:
    """Losses of every proper subset of the outputs, in first order and reverse over reverse."""
    count = len(c.problem.outputs)
    if count < 2 or c.gap("rev", "eager"):
        return
    # the smallest first: with a single output used, a formula has the most missing cotangents
    subsets = itertools.chain.from_iterable(itertools.combinations(range(count), k) for k in range(1, count))
    for subset in itertools.islice(subsets, limit):
        _subset(c, subset)


def _subset(c: Context, subset: Sequence[int]) -> None:
    p, check = c.problem, "undefined cotangents"
    label = "outputs " + ",".join(str(p.outputs[j]) for j in subset)
    reference = total([c.joint_slope[j] for j in subset])
    c.number(check, f"eager, {label}", lambda: inner(modes.gradient(p, subset=subset), p.u), reference)
    c.number(check, f"func, {label}", lambda: inner(modes.rev_func(p, subset), p.u), reference)
    curvature = total([c.curvature[j] for j in subset])
    if curvature.settled and not c.gap("rev-rev", "eager"):

        def curve(*z: Tensor) -> Tensor:
            return p.loss(*p.bent(*z), subset=subset)

        c.number(check, f"eager, {label}, rev-rev", partial(modes.rev_rev_eager, p, curve), curvature, second=True)
