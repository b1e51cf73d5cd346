"""Which inputs and outputs autograd tracks, and how often a graph is used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rows import Call
from torch import Tensor

from torch_manualgrad.testing.numerics.arithmetic import inner

from .base import Numbers, first, gradient, named, second, total, twice, variables, way
from .compilers import accumulated


def flags(out: Sequence[Tensor]) -> list[Any]:
    return [(o.requires_grad, o.is_leaf, o.grad_fn is None, o.is_inference()) for o in out]


@way("no_grad", None)
def without_grad(c: Call) -> Numbers:
    with torch.no_grad():
        out = c.bare.call(*variables(c.bare))
    return named("forward", out) | {"flags": flags(out)}


@way("inference mode", None)
def inference(c: Call) -> Numbers:
    with torch.inference_mode():
        out = c.bare.call(*c.bare.primals)
        inside = c.bare.call(*(x.clone() for x in c.bare.primals))
    return named("forward", [*out, *inside]) | {"flags": flags((*out, *inside))}


@way("grad mode switched on and off", second)
def toggled(c: Call) -> Numbers:
    p = c.problem

    def call(*xs: Tensor) -> Sequence[Tensor]:
        with torch.set_grad_enabled(False):
            p.call(*xs)
            with torch.enable_grad():
                return p.call(*xs)

    return twice(p, call)


@way("flags of the outputs", None)
def output_flags(c: Call) -> Numbers:
    p = c.bare
    args = variables(p)
    flat = p.flat(*args)
    return {"flags": flags(flat), "layouts": [(tuple(o.shape), o.dtype, o.stride()) for o in flat]}


def subsets(c: Call) -> list[list[int]]:
    n = len(c.problem.primals)
    return [[i] for i in range(n)] if n > 1 else [[0]]


@way("each input alone", first)
def alone(c: Call) -> Numbers:
    """Only one of the inputs requires grad."""
    p = c.problem
    found: dict[str, Any] = {}
    for (i,) in subsets(c):
        xs = [x.detach().clone().requires_grad_(i == j) for j, x in enumerate(p.primals)]
        found[f"gradient {i}"] = gradient(total(p, p.call(*xs)), [xs[i]])[0]
    return found


@way("each output alone", lambda c: _each_output(c, together=True))
def each_output(c: Call) -> Numbers:
    return _each_output(c, together=False)


def _each_output(c: Call, together: bool) -> Numbers:
    """Its cotangent alone is defined; or all are, the others as zeros."""
    p = c.problem
    found: dict[str, Any] = {}
    for j in range(len(p.outputs)):
        xs = variables(p)
        losses = p.losses(p.call(*xs))
        value = torch.stack([loss * (i == j) for i, loss in enumerate(losses)]).sum() if together else losses[j]
        found |= named(f"gradient of {j} in", gradient(value, xs))
    return found


@way("through .grad, graph retained", first)
def retained(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    value = total(p, out)
    value.backward(retain_graph=True)
    value.backward()
    return named("forward", forward) | named("gradient", [accumulated(x) / 2 for x in xs])


@way("backward twice without the graph", None)
def freed(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    value = total(p, p.call(*xs))
    value.backward()
    try:
        value.backward()
    except RuntimeError as error:
        return {"refused": type(error).__name__}
    return {"refused": ""}


@way("create_graph and .grad", second)
def through_grad(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle of references, which is undone below
        total(p, out).backward(create_graph=True)
    grads = [accumulated(x) for x in xs]
    for x in xs:
        x.grad = None
    live = inner(grads, p.u)
    return (
        named("forward", forward)
        | named("gradient", [g.detach() for g in grads])
        | named("hessian", gradient(live, xs) if live.requires_grad else [torch.zeros_like(x) for x in xs])
    )
