"""Hooks, and names of nodes."""

from __future__ import annotations

from typing import Any

import torch
from rows import Call
from torch import Tensor

import torch_manualgrad as mg

from .base import DEAR, Numbers, first, named, once, total, variables, way
from .batched import pullback
from .compilers import accumulated


@way("hooks on tensors and nodes", first)
def hooks(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    seen: list[str] = []
    for i, x in enumerate(xs):
        x.register_post_accumulate_grad_hook(lambda x, i=i: seen.append(f"accumulated {i}"))
    out = p.call(*(x * 1 for x in xs))
    forward = [o.detach().clone() for o in out]
    for o in out:
        if o.requires_grad:
            o.retain_grad()
            o.register_hook(lambda g: g * 2)
    for node in dict.fromkeys(o.grad_fn for o in out if o.requires_grad):  # several results may have one
        node.register_prehook(lambda gs: tuple(None if g is None else g / 2 for g in gs))
        node.register_hook(lambda gs, _: seen.append("node"))
    value = total(p, out)
    value.register_hook(lambda g: g * 1)
    value.backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in xs]) | {"seen": sorted(seen)}


@way("hooks on a module", first)
def module_hooks(c: Call) -> Numbers:
    class Inner(torch.nn.Module):
        def forward(self, *xs: Tensor) -> Any:
            return c.problem.call(*xs)

    model = Inner()
    model.register_full_backward_pre_hook(lambda m, gs: tuple(None if g is None else g * 2 for g in gs))
    model.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g / 2 for g in gi))
    return once(c.problem, model)


@way("names of nodes", None)
def node_names(c: Call) -> Numbers:
    out = c.bare.call(*variables(c.bare))
    names = [o.grad_fn.name().rstrip("0123456789") if o.grad_fn is not None else None for o in out]
    if "torch::autograd::NotImplemented" in names:
        raise RuntimeError("PyTorch has no derivative")
    return {"nodes": names}


@way("inside an autograd.Function that differentiates in its backward", first)
def reentrant(c: Call) -> Numbers:
    p = c.problem

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: Tensor) -> Any:
            with torch.enable_grad():
                ctx.xs = [x.detach().requires_grad_() for x in xs]
                ctx.out = p.call(*ctx.xs)
            return tuple(o.detach() for o in ctx.out)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return tuple(pullback(ctx.out, ctx.xs, grads))

    return once(p, Inner.apply)


@way("names in the profiler", None, cost=DEAR)
def profiler_names(c: Call) -> Numbers:
    """Which operators of the rules' names are seen by the profiler in the forward."""
    from torch.profiler import ProfilerActivity, profile

    ours = set(mg.rules)
    xs = variables(c.bare)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        c.bare.call(*xs)
    plain = {n.split(".")[0] for n in ours}
    return {"names": sorted({e.key for e in seen.key_averages() if e.key in plain})}
