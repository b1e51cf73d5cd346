"""torch.compile and compiled autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rows import Call
from torch import Tensor

from .base import DEAR, SLOW, Numbers, first, named, once, total, variables, way
from .transforms import slope


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def compiled(c: Call, backend: str) -> Numbers:
    with fresh_compiler():
        return once(c.problem, torch.compile(lambda *xs: c.problem.call(*xs), backend=backend, fullgraph=True))


way("compile, aot_eager", first, cost=DEAR)(lambda c: compiled(c, "aot_eager"))
way("compile, inductor", first, cost=SLOW)(lambda c: compiled(c, "inductor"))


@way("compile of func.grad", first, cost=DEAR)
def compiled_gradient(c: Call) -> Numbers:
    p = c.problem
    with fresh_compiler():
        everything = tuple(range(len(p.primals)))
        f = torch.func.grad(lambda *xs: total(p, p.call(*xs)), argnums=everything)
        found = torch.compile(lambda *xs: f(*xs), backend="aot_eager", fullgraph=True)(*p.primals)
    return named("gradient", found)


@way("compile of func.jvp", slope, cost=DEAR)
def compiled_slope(c: Call) -> Numbers:
    p = c.problem
    with fresh_compiler():
        jvp = torch.compile(
            lambda xs, us: torch.func.jvp(lambda *xs: total(p, p.call(*xs)), xs, us)[1],
            backend="aot_eager",
            fullgraph=True,
        )
        return {"slope": jvp(tuple(p.primals), tuple(p.u))}


@way("compiled autograd", first, cost=DEAR)
def compiled_autograd(c: Call) -> Numbers:
    from torch._dynamo import compiled_autograd

    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    value = total(p, out)
    with fresh_compiler(), compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        value.backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in xs])


def accumulated(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
