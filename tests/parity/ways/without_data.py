"""Tensors without data, and tracers: meta, fake tensors, make_fx, functionalize, torch.jit.trace, torch.export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rows import Call
from torch import Tensor

from torch_manualgrad.testing.comparison.problem import Problem

from .base import DEAR, Numbers, first, named, once, way
from .batched import cotangents, pullback


def structure(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device.type


def without_data(c: Call, convert: Callable[[Tensor], Tensor]) -> Numbers:
    p = c.problem
    other = p.at([convert(x) if isinstance(x, Tensor) else x for x in p.leaves])
    xs = [x.detach().requires_grad_() for x in other.primals]
    out = other.call(*xs)
    grads = pullback(out, xs, [torch.ones_like(o) for o in out], create_graph=True)
    found = {"outputs": [structure(o) for o in out], "gradient": [structure(g) for g in grads]}
    again = [g for g in grads if g.requires_grad]
    try:
        twice = pullback(again, xs, [torch.ones_like(g) for g in again]) if again else []
    except Exception as error:
        return found | {"hessian": error}
    return found | {"hessian": [structure(g) for g in twice]}


@way("meta device", None)
def meta(c: Call) -> Numbers:
    return without_data(c, lambda x: x.to("meta"))


@way("fake tensors", None, cost=DEAR)
def fake(c: Call) -> Numbers:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return without_data(c, mode.from_tensor)


def inputs_of_a_graph(p: Problem, near: float) -> list[Tensor]:
    """Every tensor that the program reads: leaves, moved a little where they are differentiated, and cotangents."""
    moved = {i: x + near * u for i, x, u in zip(p.index, p.primals, p.u)}
    leaves = [moved.get(i, x) for i, x in enumerate(p.leaves) if isinstance(x, Tensor)]
    return [*leaves, *cotangents(p, 1)[0]]


def forward_and_gradient(p: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Outputs and gradients as a function of `inputs_of_a_graph`, without a constant tensor in it."""
    given = iter(tensors)
    leaves = [next(given) if isinstance(x, Tensor) else x for x in p.leaves]
    other = p.at([x.detach().requires_grad_() if i in p.index else x for i, x in enumerate(leaves)])
    out = other.call(*other.primals)
    grads = pullback(out, other.primals, list(given))
    return (*[o.detach() for o in out], *grads)


def by_func(p: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same by `torch.func`, which other transforms take."""
    given = iter(tensors)
    leaves = [next(given) if isinstance(x, Tensor) else x for x in p.leaves]
    other = p.at(leaves)
    out, pull = torch.func.vjp(other.call, *other.primals)
    return (*out, *pull(tuple(given)))


def there(c: Call) -> Numbers:
    p = c.problem
    return _split(p, forward_and_gradient(p, *inputs_of_a_graph(p, 0.01)))


def _split(p: Problem, found: Sequence[Tensor]) -> dict[str, Any]:
    n = len(p.outputs)
    return named("forward", found[:n]) | named("gradient", found[n:])


def traced(c: Call, mode: str, functionalise: bool = False) -> Numbers:
    """A graph made at the sample, evaluated near it: nothing of the sample may be baked in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    p = c.problem
    f = torch.func.functionalize(partial(by_func, p)) if functionalise else partial(forward_and_gradient, p)
    graph = make_fx(f, tracing_mode=mode)(*inputs_of_a_graph(p, 0.0))
    return _split(p, graph(*inputs_of_a_graph(p, 0.01)))


way("make_fx, real", there, cost=DEAR)(lambda c: traced(c, "real"))
way("make_fx, fake", there, cost=DEAR)(lambda c: traced(c, "fake"))
way("make_fx, symbolic", there, cost=DEAR)(lambda c: traced(c, "symbolic"))
way("make_fx of functionalize", there, cost=DEAR)(lambda c: traced(c, "real", functionalise=True))


@way("functionalize", there)
def functionalised(c: Call) -> Numbers:
    p = c.problem
    return _split(p, torch.func.functionalize(partial(by_func, p))(*inputs_of_a_graph(p, 0.01)))


@way("torch.jit.trace", first, cost=DEAR)
def jit_traced(c: Call) -> Numbers:
    """Traced at other values, and then called: no tensor may have become a constant."""
    p = c.problem
    elsewhere = [x + 1e-3 * x for x in p.primals]
    traced = torch.jit.trace(lambda *xs: p.call(*xs), elsewhere, check_trace=False)

    def call(*xs: Tensor) -> Sequence[Tensor]:
        found = traced(*xs)
        return found if isinstance(found, (tuple, list)) else (found,)

    return once(p, call)


@way("torch.export", first, cost=DEAR)
def exported(c: Call) -> Numbers:
    p = c.problem

    class Model(torch.nn.Module):
        def forward(self, *xs: Tensor) -> Any:
            return p.call(*xs)

    program = torch.export.export(Model(), p.primals)
    operators = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    return once(p, program.module()) | {"operators": operators}
